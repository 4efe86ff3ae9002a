"""LEAF's small convolutional network.

Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: A Benchmark for
Federated Settings", 2018; the network of its FEMNIST task.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from knnper.config.ranges import PositiveInt
from knnper.data.examples import InputSpec
from knnper.models.base import EmbeddingModel, ModelSettings
from knnper.models.checks import require_channels, require_multiple
from knnper.models.normalization import OptionalNorm, norm_layers

_WIDTHS = (32, 64)


@dataclass(frozen=True)
class LeafCnnSettings(ModelSettings):
    """Settings of `LeafCnn`.

    Attributes
    ----------
    embedding_dim
        p, the width of the last hidden layer. LEAF's FEMNIST network has 2048.
    norm
        What stands behind each convolution: ``batch`` is BatchNorm, ``group`` is
        GroupNorm in 8 groups.
    """

    embedding_dim: PositiveInt = 512
    norm: OptionalNorm = "none"


class LeafCnn(EmbeddingModel):
    """Two 5x5 convolutions with pooling, one hidden layer.

    Parameters
    ----------
    settings
        Width of the hidden layer.
    spec
        Images with 1 or 3 channels, height and width multiples of 4.

    Raises
    ------
    ConfigError
        If the images are of another shape.
    """

    def __init__(self, settings: LeafCnnSettings, spec: InputSpec) -> None:
        super().__init__()
        require_channels(spec, (1, 3), "leaf_cnn")
        require_multiple(spec, 4, "leaf_cnn")
        height, width, channels = spec.image_shape
        self.embedding_dim = settings.embedding_dim
        self.num_classes = spec.num_classes
        first, second = _WIDTHS
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, kernel_size=5, padding=2),
            *norm_layers(settings.norm, first),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            *norm_layers(settings.norm, second),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (height // 4) * (width // 4), settings.embedding_dim),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(settings.embedding_dim, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the hidden layer's activations, shape (n, p)."""
        embeddings: Tensor = self.features(x)
        return embeddings
