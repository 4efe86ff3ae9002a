"""How what is served does on a site's test split, by the evaluation of a run."""

from dataclasses import dataclass

from client.residence.mixture import predict
from client.residence.names import Names
from client.residence.serving import Accuracy, Serving
from datastore.store_reader import StoreReader
from knnper.data.examples import Examples
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.evaluation import Evaluation, score


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
        mixed=score(made.probabilities, test.labels),
        global_model=score(made.global_probabilities, test.labels),
        knn=None if votes is None else score(votes, test.labels),
    )
