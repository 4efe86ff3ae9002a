"""What every model offers: a representation and a head on top of it."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class EmbeddingModel(nn.Module, ABC):
    """A classifier split into φ (the representation) and the head.

    Attributes
    ----------
    embedding_dim
        p, the size of the representation.
    num_classes
        c, the number of labels.
    """

    embedding_dim: int
    num_classes: int

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p).

        Parameters
        ----------
        x
            Normalised images, float32 of shape (n, channels, height, width).
        """

    @abstractmethod
    def head(self, z: Tensor) -> Tensor:
        """Return the logits, float32 of shape (n, c), of representations (n, p)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, shape (n, c)."""
        return self.head(self.embed(x))
