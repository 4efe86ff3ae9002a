"""What every model offers: a representation and a head on top of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

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
    published_head
        What files from elsewhere may call the head instead of ``classifier``.
    learns_from_embeddings
        Whether `losses` depends on the inputs through φ(x) alone.
    """

    embedding_dim: int
    num_classes: int
    classifier: nn.Module
    published_head: str = "classifier"
    learns_from_embeddings: bool = True

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p).

        Parameters
        ----------
        x
            Normalised images, float32 of shape (n, channels, height, width); of text
            ids, int64 of shape (n, T, 1, 1).
        """

    def head(self, z: Tensor) -> Tensor:
        """Return the logits, float32 of shape (n, c), of representations (n, p)."""
        logits: Tensor = self.classifier(z)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, shape (n, c)."""
        return self.head(self.embed(x))

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return what training minimises the mean of, of each example: -log h(x)[y].

        Parameters
        ----------
        inputs
            As `embed` takes them, n of them.
        labels
            int64, shape (n,).

        Returns
        -------
        Tensor
            float32, shape (n,).
        """
        return self.position_losses(inputs, labels).mean(dim=1)

    def position_losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return -log h(x)[y] of each prediction that `losses` is the mean of.

        Parameters
        ----------
        inputs, labels
            See `losses`.

        Returns
        -------
        Tensor
            float32, shape (n, T) for T predictions an example: one, of the label.
        """
        logits = self(inputs).float()
        return functional.cross_entropy(logits, labels, reduction="none")[:, None]
