"""What the service needs of whoever has the model and the memory."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from datastore.contents import Ids
from datastore.examples import Added, Selection
from datastore.neighbors import Neighbors
from datastore.prediction.class_prior import ClassPrior
from datastore.store_reader import StoreReader
from knnper.data.examples import InputSpec


class Prediction(Protocol):
    """Predictions for n inputs, all from one state of model and store.

    c is the number of classes, k' the number of neighbours that were found.
    """

    @property
    def labels(self) -> Tensor:
        """The most probable class of each input, int64 of shape (n,)."""

    @property
    def probabilities(self) -> Tensor:
        """λ p_kNN + (1 - λ) p_global, float32 of shape (n, c)."""

    @property
    def knn_probabilities(self) -> Tensor | None:
        """p_kNN, float32 of shape (n, c); None where the store is empty."""

    @property
    def global_probabilities(self) -> Tensor:
        """p_global, float32 of shape (n, c)."""

    @property
    def adapted_probabilities(self) -> Tensor | None:
        """p_global with the class prior, float32 of shape (n, c); None without one."""

    @property
    def knn_weight(self) -> float:
        """λ as it was used."""

    @property
    def neighbors(self) -> Neighbors:
        """The neighbours, shape (n, k')."""

    @property
    def neighbor_weights(self) -> Tensor:
        """Each neighbour's share of the vote, float64 of shape (n, k')."""

    @property
    def neighbor_names(self) -> Sequence[Sequence[str | None]]:
        """The owner's names of the neighbours, n rows of k'."""

    @property
    def fingerprint(self) -> str:
        """Of the model."""

    @property
    def num_stored(self) -> int:
        """Examples in the store that was searched."""


class Model(Protocol):
    """The global model, as far as it is told about."""

    @property
    def fingerprint(self) -> str:
        """What it is told apart by."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each label."""

    @property
    def spec(self) -> InputSpec:
        """What its input is like."""


class Accuracy(Protocol):
    """Shares of held-out examples that were predicted rightly; None is not known."""

    @property
    def global_model(self) -> float | None:
        """Of the global model alone."""

    @property
    def knn(self) -> float | None:
        """Of the neighbours alone."""

    @property
    def mixed(self) -> float | None:
        """Of both, as they are served."""

    @property
    def num_examples(self) -> int | None:
        """On how many examples."""

    @property
    def measured_on(self) -> str | None:
        """On which."""


class Serving(Protocol):
    """How model and memory are mixed."""

    @property
    def knn_weight(self) -> float:
        """λ, the weight of the neighbours."""

    @property
    def num_neighbors(self) -> int:
        """Return k."""

    @property
    def kernel(self) -> str:
        """A name of `datastore.prediction.kernel.KERNELS`."""

    @property
    def kernel_scale(self) -> float:
        """σ, the scale of the distances."""

    @property
    def class_prior(self) -> ClassPrior | None:
        """How the global model is adapted to the labels that are stored."""

    @property
    def accuracy(self) -> Accuracy:
        """What was measured when λ was chosen."""


class Served(Protocol):
    """A model and a store that belong together; any number of threads may ask."""

    @property
    def model(self) -> Model:
        """The global model that is served now."""

    @property
    def serving(self) -> Serving:
        """How it is served now."""

    @property
    def store(self) -> StoreReader:
        """The client's memory, to be looked at."""

    def predict(self, images: Tensor) -> Prediction:
        """Return the predictions for inputs, shape (n, ...)."""

    def add(self, images: Tensor, labels: Tensor, names: Sequence[str | None]) -> Added:
        """Store examples; they are on disk when this returns."""

    def delete(self, selection: Selection) -> Ids:
        """Delete examples, and every trace of them, and return their ids."""

    def refresh(self) -> bool:
        """Serve a newer model if one is installed; return whether that was so.

        It takes as long as embedding the store anew; predictions go on meanwhile.
        """

    def close(self) -> None:
        """Let others write to the store."""
