"""What a client serves: the global model and its local memory, mixed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from datastore.prediction.hypothesis import LocalHypothesis
from datastore.prediction.interpolation import interpolate


@dataclass(frozen=True)
class KnnPredictor:
    """h_{m,λ} of knn-per.txt, Eq. 7. With an empty store it is the global model.

    Attributes
    ----------
    embed
        φ: from uint8 images (n, height, width, channels) to float32 (n, p).
    head
        From representations (n, p) to the global model's probabilities (n, c).
    neighbors
        The local hypothesis.
    knn_weight
        λ, in [0, 1]: 1 is kNN only, 0 is the global model only.
    tuning
        More figures on how it was chosen, by name.
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    neighbors: LocalHypothesis
    knn_weight: float
    tuning: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c); rows sum to 1.

        Parameters
        ----------
        images
            uint8, shape (n, height, width, channels). Each is embedded once.

        Raises
        ------
        DataError
            If an embedding is not finite.
        """
        embeddings = self.embed(images)
        global_probabilities = self.head(embeddings)
        if self.effective_knn_weight == 0:
            return global_probabilities
        knn_probabilities = self.neighbors(embeddings)
        return interpolate(knn_probabilities, global_probabilities, self.knn_weight)

    @property
    def effective_knn_weight(self) -> float:
        """λ as it is used: 0 where the store is empty."""
        return self.knn_weight if self.neighbors.num_stored else 0.0

    def describe(self) -> Mapping[str, float]:
        """Return λ as it is used, the number of stored examples, and ``tuning``."""
        return {
            **self.tuning,
            "knn_weight": self.effective_knn_weight,
            "num_stored": float(self.neighbors.num_stored),
        }
