"""LEAF's stacked LSTM, which predicts the next character.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, section 3; Caldas et al., "LEAF: A
Benchmark for Federated Settings", 2018, its Shakespeare task.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.config.ranges import PositiveInt
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings


@dataclass(frozen=True)
class StackedLstmSettings(ModelSettings):
    """Settings of `StackedLstm`.

    Attributes
    ----------
    character_dim
        Size of the vector that a character is turned into first.
    hidden_dim
        Units of each layer.
    num_layers
        Layers of LSTM, one on top of the other.
    all_positions
        Whether training learns from each character of a window, predicted from those
        before it, and not from the one behind the window alone.
    """

    character_dim: PositiveInt = 8
    hidden_dim: PositiveInt = 256
    num_layers: PositiveInt = 2
    all_positions: bool = True


class StackedLstm(EmbeddingModel):
    """Character vectors, layers of LSTM, and a linear head on the last hidden state.

    φ is the concatenation of the hidden states of all layers, the first one's first,
    and of their cell states in the same order, behind the window's last character
    (knn-per.txt, section 5): p = 2 x ``num_layers`` x ``hidden_dim``.

    Parameters
    ----------
    settings
        Sizes, and what is learned from.
    spec
        Windows of T characters. The ids in them are of what the labels are of, too.
    """

    def __init__(self, settings: StackedLstmSettings, spec: InputSpec) -> None:
        super().__init__()
        hidden = settings.hidden_dim
        inputs = (settings.character_dim, *[hidden] * (settings.num_layers - 1))
        self.embedding_dim = 2 * settings.num_layers * hidden
        self.num_classes = spec.num_classes
        self.learns_from_embeddings = not settings.all_positions
        self.characters = nn.Embedding(spec.num_classes, settings.character_dim)
        # One module a layer: methods that keep some layers personal count modules.
        self.layers = nn.ModuleList(
            nn.LSTM(width, hidden, batch_first=True) for width in inputs
        )
        start = (settings.num_layers - 1) * hidden
        self.classifier: PartHead = PartHead(start, hidden, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the last hidden and cell states, float32 of shape (n, p).

        Parameters
        ----------
        x
            Ids of characters, int64 of shape (n, T, 1, 1).
        """
        _, hidden, cells = self._run(x.flatten(start_dim=1))
        return torch.cat([*hidden, *cells], dim=1)

    def position_losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return -log h(x)[y] at all positions, float32 of shape (n, T).

        The targets of a window's T positions are its second to last characters, and
        then the label. Without ``all_positions`` it is the label's loss alone, (n, 1).
        """
        if self.learns_from_embeddings:
            return super().position_losses(inputs, labels)
        windows = inputs.flatten(start_dim=1)
        outputs, _, _ = self._run(windows)
        logits = self.classifier.of_part(outputs).float()
        targets = torch.cat([windows[:, 1:], labels[:, None]], dim=1)
        losses = functional.cross_entropy(
            logits.flatten(end_dim=1), targets.flatten(), reduction="none"
        )
        return losses.view(targets.shape)

    def _run(self, windows: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the last layer's hidden states, and each layer's last states.

        Returns
        -------
        outputs
            Shape (n, T, hidden_dim).
        hidden, cells
            One of shape (n, hidden_dim) for each layer.
        """
        outputs = self.characters(windows)
        hidden, cells = [], []
        for layer in self.layers:
            outputs, (last_hidden, last_cell) = layer(outputs)
            hidden.append(last_hidden[0])
            cells.append(last_cell[0])
        return outputs, hidden, cells


class PartHead(nn.Module):
    """A linear layer on a part of the representation.

    Parameters
    ----------
    start, width
        Where this part begins, and its length.
    num_classes
        c.
    """

    def __init__(self, start: int, width: int, num_classes: int) -> None:
        super().__init__()
        self._part = slice(start, start + width)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits (n, c) of representations (n, p)."""
        return self.of_part(z[:, self._part])

    def of_part(self, part: Tensor) -> Tensor:
        """Return logits (..., c) of the part alone, shape (..., width)."""
        logits: Tensor = self.linear(part)
        return logits
