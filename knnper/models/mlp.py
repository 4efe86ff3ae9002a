"""A multilayer perceptron, for rows of features."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from knnper.config.ranges import PositiveInt
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.normalization import NUM_GROUPS, group_norm


@dataclass(frozen=True)
class MlpSettings(ModelSettings):
    """Settings of `Mlp`.

    Attributes
    ----------
    hidden_sizes
        Widths of the hidden layers, first to last; the last is p, the size of the
        representation.
    norm
        ``group`` puts GroupNorm in 8 groups behind every hidden layer, whose widths
        must then be multiples of 8; ``none`` puts nothing there.
    """

    hidden_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64)
    norm: Literal["none", "group"] = "none"

    def __post_init__(self) -> None:
        odd = [width for width in self.hidden_sizes if width % NUM_GROUPS]
        if self.norm == "group" and odd:
            raise ValueError(
                f"found hidden_sizes of {odd[0]} with norm = group, expected multiples "
                f"of {NUM_GROUPS}; change the width, or set norm to none"
            )


class Mlp(EmbeddingModel):
    """Fully connected hidden layers with ReLU; φ is what comes out of the last one.

    Parameters
    ----------
    settings
        Widths and normalisation.
    spec
        Inputs of any shape; images are taken as rows of their values.
    """

    def __init__(self, settings: MlpSettings, spec: InputSpec) -> None:
        super().__init__()
        height, width, channels = spec.image_shape
        widths = (height * width * channels, *settings.hidden_sizes)
        layers: list[nn.Module] = [nn.Flatten()]
        for number_in, number_out in itertools.pairwise(widths):
            layers.append(nn.Linear(number_in, number_out))
            if settings.norm == "group":
                layers.append(group_norm(number_out))
            layers.append(nn.ReLU())
        self.embedding_dim = widths[-1]
        self.num_classes = spec.num_classes
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the last hidden layer's activations, shape (n, p)."""
        embeddings: Tensor = self.features(x)
        return embeddings
