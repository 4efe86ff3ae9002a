"""The local hypothesis: k nearest neighbours, weighted by a kernel."""

from dataclasses import dataclass

from torch import Tensor

from datastore.prediction.kernel import KERNELS, KernelName
from datastore.prediction.vote import neighbor_vote
from datastore.store_reader import StoreReader


@dataclass(frozen=True)
class NeighborClassifier:
    """h^(k) of knn-per.txt, Eq. 6.

    Attributes
    ----------
    store
        The client's memory.
    num_neighbors
        k.
    kernel
        A name of `datastore.prediction.kernel.KERNELS`.
    kernel_scale
        σ.
    """

    store: StoreReader
    num_neighbors: int
    kernel: KernelName
    kernel_scale: float

    @property
    def num_stored(self) -> int:
        """n, the number of stored examples."""
        return len(self.store)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return p_kNN, float32 of shape (n, c), for representations (n, p).

        Raises
        ------
        ValueError
            If the store is empty.
        DataError
            If a representation is not finite or p differs from the store's.
        """
        neighbors = self.store.search(embeddings, self.num_neighbors)
        log_weights = KERNELS[self.kernel](
            neighbors.squared_distances, self.kernel_scale, self.store.embedding_dim
        )
        return neighbor_vote(log_weights, neighbors.labels, self.store.num_classes)
