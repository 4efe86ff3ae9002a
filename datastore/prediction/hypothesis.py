"""What a client's memory says of an example, in whatever form it is kept."""

from typing import Protocol

from torch import Tensor


class LocalHypothesis(Protocol):
    """The local part of the mixture of knn-per.txt, Eq. 7."""

    @property
    def num_stored(self) -> int:
        """Return the examples, or what stands for them; without any it says nothing."""

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p)."""
