"""How what is served does on a site's test split, by the evaluation of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from client.residence.mixture import predict
from client.residence.names import Names
from client.residence.serving import Accuracy, Serving
from datastore.store_reader import StoreReader
from knnper.data.examples import Examples
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.evaluation import Evaluation, evaluate


@dataclass(frozen=True)
class Tested:
    """How a client's predictions do.

    Attributes
    ----------
    mixed, global_model
        What is served, and the global model alone.
    knn
        The neighbours alone; None where the store is empty.
    """

    mixed: Evaluation
    global_model: Evaluation
    knn: Evaluation | None

    def accuracy(self) -> Accuracy:
        """Return the shares that are right; the split must not be empty."""
        return Accuracy(
            global_model=self.global_model.accuracy,
            knn=None if self.knn is None else self.knn.accuracy,
            mixed=self.mixed.accuracy,
            num_examples=self.mixed.num_examples,
            measured_on="test",
        )


@dataclass(frozen=True, eq=False)
class _Made:
    """Predictions that are made already, as a predictor.

    Attributes
    ----------
    probabilities
        Shape (n, c).
    """

    probabilities: Tensor

    def __call__(self, images: Tensor) -> Tensor:  # noqa: ARG002 (made of these)
        return self.probabilities

    def describe(self) -> Mapping[str, float]:
        """Return nothing: nothing was chosen."""
        return {}


def tested(
    model: GlobalModel, store: StoreReader, serving: Serving, test: Examples
) -> Tested:
    """Return how a client does on its test split, of which each input is read once.

    Parameters
    ----------
    model, store, serving
        The parts of what is served.
    test
        The split.
    """
    made = predict(model, store, serving, Names(store), test.images)
    votes = made.knn_probabilities
    return Tested(
        mixed=evaluate(_Made(made.probabilities), test),
        global_model=evaluate(_Made(made.global_probabilities), test),
        knn=None if votes is None else evaluate(_Made(votes), test),
    )
