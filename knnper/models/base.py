"""What every model offers: a representation and a head on top of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from knnper.config.sections import Settings


@dataclass(frozen=True)
class ModelSettings(Settings):
    """What can be set for every model.

    Attributes
    ----------
    weights
        Path of a local ``.safetensors`` file to start from, its tensors named as in
        the model's ``state_dict``; null starts from random weights. A head for another
        number of classes is left out.
    """

    weights: str | None = None


class EmbeddingModel(nn.Module, ABC):
    """A classifier split into φ (the representation) and the head.

    Attributes
    ----------
    embedding_dim
        p, the size of the representation.
    num_classes
        c, the number of labels.
    classifier
        The layers of the head, from (n, p) to logits (n, c). Whatever lies outside
        belongs to φ.
    """

    embedding_dim: int
    num_classes: int
    classifier: nn.Module

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p).

        Parameters
        ----------
        x
            Normalised images, float32 of shape (n, channels, height, width).
        """

    def head(self, z: Tensor) -> Tensor:
        """Return the logits, float32 of shape (n, c), of representations (n, p)."""
        logits: Tensor = self.classifier(z)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, shape (n, c)."""
        return self.head(self.embed(x))
