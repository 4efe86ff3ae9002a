"""Networks that are trained from scratch."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import InputSpec
from knnper.embedding_model import ModelSettings, Network, require_input
from knnper.layers import TolerantBatchNorm2d
from knnper.process import import_torchvision
from knnper.settings import PositiveFraction, PositiveInt, ProperFraction

Norm = Literal["batch", "group"]
OptionalNorm = Literal["none", "batch", "group"]
NUM_GROUPS = 8

INITIAL_DEVIATION = 0.01
"""Standard deviation of the initial weights: small, so that predictions are nearly
uniform at first, and not zero, so that several models differ."""


def require_multiple(spec: InputSpec, factor: int, model: str) -> None:
    """Reject images unless height and width are multiples of ``factor``."""
    height, width, _ = spec.image_shape
    holds = min(height, width) >= factor and height % factor == width % factor == 0
    expected = f"images whose height and width are multiples of {factor}"
    require_input(spec, model, holds=holds, expected=expected)


def require_channels(spec: InputSpec, model: str) -> None:
    """Reject images that have neither 1 nor 3 channels."""
    holds = spec.image_shape[2] in (1, 3)
    require_input(spec, model, holds=holds, expected="images with 1 or 3 channels")


def group_norm(num_channels: int) -> nn.GroupNorm:
    """Return GroupNorm in `NUM_GROUPS` groups, which must divide ``num_channels``."""
    return nn.GroupNorm(NUM_GROUPS, num_channels)


NORMS: Mapping[Norm, Callable[[int], nn.Module]] = {
    "batch": TolerantBatchNorm2d,
    "group": group_norm,
}


def norm_layers(norm: OptionalNorm, num_channels: int) -> list[nn.Module]:
    """Return the layers of normalisation after a convolution: one or none."""
    return [] if norm == "none" else [NORMS[norm](num_channels)]


@dataclass(frozen=True)
class ScalableSettings(ModelSettings):
    """Settings of a network that can be made narrower.

    Attributes
    ----------
    width
        Fraction of each hidden layer's channels, (0, 1], rounded up. The numbers of
        inputs and labels do not change.
    """

    width: PositiveFraction = 1.0

    def scaled(self, num_channels: int) -> int:
        """Return the number of channels at this width."""
        return math.ceil(self.width * num_channels)


def _two_convolutions(
    settings: "LeafCnnSettings | TinyCnnSettings",
    spec: InputSpec,
    widths: tuple[int, int],
    kernel_size: int,
    num_poolings: int,
) -> nn.Sequential:
    """Return two convolutions, the last ``num_poolings`` pooled, and a hidden layer."""
    height, width, channels = spec.image_shape
    reduction = 2**num_poolings
    first, second = map(settings.scaled, widths)
    num_values = second * (height // reduction) * (width // reduction)
    return nn.Sequential(
        nn.Conv2d(channels, first, kernel_size, padding=kernel_size // 2),
        *norm_layers(settings.norm, first),
        # Pooling before ReLU gives the same result from a quarter of the values.
        *[nn.MaxPool2d(2)] * (num_poolings - 1),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size, padding=kernel_size // 2),
        *norm_layers(settings.norm, second),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(num_values, settings.scaled(settings.embedding_dim)),
        nn.ReLU(),
    )


@dataclass(frozen=True)
class LeafCnnSettings(ScalableSettings):
    """Settings of `LeafCnn`.

    Attributes
    ----------
    embedding_dim
        p, the width of the last hidden layer. LEAF's FEMNIST network has 2048.
    norm
        Normalisation after each convolution: ``none``, ``batch`` (BatchNorm) or
        ``group`` (GroupNorm in 8 groups).
    """

    embedding_dim: PositiveInt = 512
    norm: OptionalNorm = "none"


class LeafCnn(Network):
    """LEAF's network for FEMNIST: two 5x5 convolutions with pooling, a hidden layer.

    Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: A Benchmark for
    Federated Settings", 2018.
    """

    name = "leaf_cnn"
    title = "LEAF CNN"
    summary = "Two 5x5 convolutions and a hidden layer, for 28x28 or 32x32 images."
    settings_type = LeafCnnSettings

    def __init__(self, settings: LeafCnnSettings, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self.embedding_dim = settings.scaled(settings.embedding_dim)
        require_channels(spec, self.name)
        require_multiple(spec, 4, self.name)
        self.features = _two_convolutions(settings, spec, (32, 64), 5, 2)
        self.classifier = nn.Linear(self.embedding_dim, spec.num_classes)


@dataclass(frozen=True)
class MlpSettings(ScalableSettings):
    """Settings of `Mlp`.

    Attributes
    ----------
    hidden_sizes
        Widths of the hidden layers, first to last; the last is p, the size of the
        representation.
    norm
        ``group``: GroupNorm in 8 groups after every hidden layer, which requires widths
        that are multiples of 8; ``none``: no normalisation.
    """

    hidden_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64)
    norm: Literal["none", "group"] = "none"

    def __post_init__(self) -> None:
        odd = [
            size for size in map(self.scaled, self.hidden_sizes) if size % NUM_GROUPS
        ]
        if self.norm == "group" and odd:
            raise ValueError(
                f"found hidden_sizes of {odd[0]} with norm = group, expected multiples "
                f"of {NUM_GROUPS}; change the width, or set norm to none"
            )


class Mlp(Network):
    """Fully connected hidden layers with ReLU; φ is the output of the last.

    Inputs have any shape; images are taken as rows of their values.
    """

    name = "mlp"
    title = "MLP"
    summary = "Fully connected hidden layers, for rows of features or images."
    settings_type = MlpSettings

    def __init__(self, settings: MlpSettings, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        hidden = [settings.scaled(size) for size in settings.hidden_sizes]
        self.embedding_dim = hidden[-1]
        widths = (math.prod(spec.image_shape), *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for number_in, number_out in itertools.pairwise(widths):
            layers.append(nn.Linear(number_in, number_out))
            if settings.norm == "group":
                layers.append(group_norm(number_out))
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], spec.num_classes)


@dataclass(frozen=True)
class MobileNetV2Settings(ModelSettings):
    """Settings of `MobileNetV2`.

    Attributes
    ----------
    norm
        ``batch`` (BatchNorm, as published) or ``group`` (GroupNorm in 8 groups, which
        keeps no statistics of the data).
    dropout
        Probability of dropping a feature before the head, [0, 1).
    """

    norm: Norm = "batch"
    dropout: ProperFraction = 0.2


class MobileNetV2(Network):
    """torchvision's MobileNetV2; φ is the output of the pooling, p = 1280."""

    name = "mobilenet_v2"
    title = "MobileNetV2"
    summary = "The paper's network for CIFAR; embeddings of 1280 numbers."
    settings_type = MobileNetV2Settings

    def __init__(self, settings: MobileNetV2Settings, spec: InputSpec) -> None:
        require_channels(spec, self.name)
        network = import_torchvision().models.mobilenet_v2(
            num_classes=spec.num_classes,
            dropout=settings.dropout,
            norm_layer=NORMS[settings.norm],
        )
        super().__init__(settings, spec)
        self.embedding_dim = int(network.last_channel)
        self.features = network.features
        self.classifier = network.classifier

    def embed(self, x: Tensor) -> Tensor:
        """Return the pooled features, shape (n, 1280)."""
        features = self.features(_in_colour(x))
        return functional.adaptive_avg_pool2d(features, 1).flatten(1)


def _in_colour(x: Tensor) -> Tensor:
    """Return images with a grey channel repeated three times."""
    return x.repeat(1, 3, 1, 1) if x.shape[1] == 1 else x


@dataclass(frozen=True)
class ResNet18Settings(ModelSettings):
    """Settings of `ResNet18`.

    Attributes
    ----------
    norm
        ``batch`` (BatchNorm, as published) or ``group`` (GroupNorm in 8 groups, which
        keeps no statistics of the data).
    stem
        First layers. ``imagenet``, as published: a 7x7 convolution and pooling reduce
        height and width to a quarter, for images of about 64 to 224 pixels. ``cifar``:
        a 3x3 convolution keeps the size, for images of about 32 pixels.
    """

    norm: Norm = "batch"
    stem: Literal["imagenet", "cifar"] = "imagenet"


class ResNet18(Network):
    """torchvision's ResNet-18; φ is the output of the pooling, p = 512.

    The tensors have torchvision's names, except for the head, which is ``classifier``
    here and ``fc`` in torchvision; a file of weights may use either. A grey channel is
    repeated three times.
    """

    name = "resnet18"
    title = "ResNet-18"
    summary = "For photographs, or small images with its other stem; p is 512."
    settings_type = ResNet18Settings
    published_head = "fc"

    def __init__(self, settings: ResNet18Settings, spec: InputSpec) -> None:
        require_channels(spec, self.name)
        network = import_torchvision().models.resnet18(
            num_classes=spec.num_classes, norm_layer=NORMS[settings.norm]
        )
        super().__init__(settings, spec)
        self.embedding_dim = int(network.fc.in_features)
        self.conv1: nn.Module = network.conv1
        self.bn1: nn.Module = network.bn1
        self.maxpool: nn.Module = network.maxpool
        if settings.stem == "cifar":
            self.conv1 = _convolution(3, network.conv1.out_channels)
            # The initialisation of torchvision's other convolutions.
            nn.init.kaiming_normal_(
                self.conv1.weight, mode="fan_out", nonlinearity="relu"
            )
            self.maxpool = nn.Identity()
        self.layer1: nn.Module = network.layer1
        self.layer2: nn.Module = network.layer2
        self.layer3: nn.Module = network.layer3
        self.layer4: nn.Module = network.layer4
        self.classifier = network.fc

    def embed(self, x: Tensor) -> Tensor:
        """Return the pooled features, shape (n, 512)."""
        features = self.conv1(_in_colour(x))
        features = self.maxpool(functional.relu(self.bn1(features)))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = layer(features)
        return functional.adaptive_avg_pool2d(features, 1).flatten(1)


@dataclass(frozen=True)
class SmallResNetSettings(ModelSettings):
    """Settings of `SmallResNet`.

    Attributes
    ----------
    embedding_dim
        p, the number of channels of the last convolution.
    norm
        Normalisation after each convolution: ``group`` (GroupNorm in 8 groups, which
        keeps no statistics of the data) or ``batch`` (BatchNorm).
    """

    embedding_dim: Literal[128, 256, 512] = 256
    norm: Norm = "group"


class SmallResNet(Network):
    """Four 3x3 convolutions with pooling, and a residual block before the last.

    φ is the largest activation of each channel, so that images of any size from 16x16
    are accepted.
    """

    name = "small_resnet"
    title = "Small ResNet"
    summary = "Four convolutions and a residual block, for 32x32 images on CPUs."
    settings_type = SmallResNetSettings

    def __init__(self, settings: SmallResNetSettings, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self.embedding_dim = settings.embedding_dim
        height, width, channels = spec.image_shape
        holds = min(height, width) >= 16
        expected = "images of 16x16 pixels and more"
        require_input(spec, self.name, holds=holds, expected=expected)
        self.features = nn.Sequential(
            _halving(channels, 32, settings.norm),
            _halving(32, 64, settings.norm),
            _halving(64, 128, settings.norm),
            _Residual(128, settings.norm),
            _halving(128, settings.embedding_dim, settings.norm),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(settings.embedding_dim, spec.num_classes)


class _Residual(nn.Module):
    """x + F(x) with two convolutions in F."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        layers = [_convolution(width, width), NORMS[norm](width), nn.ReLU()]
        second_half = [_convolution(width, width), NORMS[norm](width), nn.ReLU()]
        self.residual = nn.Sequential(*layers, *second_half)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + F(x), of the shape of ``x``."""
        result: Tensor = x + self.residual(x)
        return result


def _halving(channels: int, width: int, norm: Norm) -> nn.Sequential:
    # Pooling first, so that a quarter of the values are normalised.
    return nn.Sequential(
        _convolution(channels, width), nn.MaxPool2d(2), NORMS[norm](width), nn.ReLU()
    )


def _convolution(channels: int, width: int) -> nn.Conv2d:
    # Without a bias, since the normalisation after it has one.
    return nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)


class SoftmaxRegression(Network):
    """Logits W x + b of inputs of any shape; φ is the input itself, as a row."""

    name = "softmax_regression"
    title = "Softmax regression"
    summary = "One linear layer on the raw inputs, features or images."
    settings_type = ModelSettings

    def __init__(self, settings: ModelSettings, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self.embedding_dim = math.prod(spec.image_shape)
        self.classifier = nn.Linear(self.embedding_dim, spec.num_classes)
        nn.init.normal_(self.classifier.weight, std=INITIAL_DEVIATION)
        nn.init.zeros_(self.classifier.bias)

    def embed(self, x: Tensor) -> Tensor:
        """Return the inputs as rows, shape (n, p)."""
        return x.flatten(start_dim=1)


@dataclass(frozen=True)
class StackedLstmSettings(ModelSettings):
    """Settings of `StackedLstm`.

    Attributes
    ----------
    character_dim
        Size of the embedding of a character.
    hidden_dim
        Units of each layer.
    num_layers
        Number of stacked LSTM layers.
    all_positions
        Whether training predicts every character of a window from the characters before
        it, or only the character after the window.
    """

    character_dim: PositiveInt = 8
    hidden_dim: PositiveInt = 256
    num_layers: PositiveInt = 2
    all_positions: bool = True


class StackedLstm(Network):
    """Character vectors, layers of LSTM, and a linear head on the last hidden state.

    φ is the concatenation of the hidden states of all layers, the first one's first,
    and of their cell states in the same order, behind the window's last character
    (Marfoq et al. 2022, section 5): p = 2 x ``num_layers`` x ``hidden_dim``.
    """

    name = "stacked_lstm"
    title = "Stacked LSTM"
    summary = "LEAF's network for the next character; embeddings of 1024 numbers."
    settings_type = StackedLstmSettings
    takes = ("token",)

    def __init__(self, settings: StackedLstmSettings, spec: InputSpec) -> None:
        hidden = settings.hidden_dim
        super().__init__(settings, spec)
        self.embedding_dim = 2 * settings.num_layers * hidden
        inputs = (settings.character_dim, *[hidden] * (settings.num_layers - 1))
        self.learns_from_embeddings = not settings.all_positions
        self.characters = nn.Embedding(spec.num_classes, settings.character_dim)
        # One module for each layer, since methods with personal layers count modules.
        self.layers = nn.ModuleList(
            nn.LSTM(width, hidden, batch_first=True) for width in inputs
        )
        start = (settings.num_layers - 1) * hidden
        self.classifier: PartHead = PartHead(start, hidden, spec.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the last states, (n, p), of ids of characters, int64 (n, T, 1, 1)."""
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
        losses = self.criterion(logits.flatten(end_dim=1), targets.flatten())
        return losses.view(targets.shape)

    def _run(self, windows: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the last layer's hidden states, and each layer's last states.

        Of shape (n, T, hidden_dim); the last hidden and cell states (n, hidden_dim).
        """
        outputs = self.characters(windows)
        hidden, cells = [], []
        for layer in self.layers:
            outputs, (last_hidden, last_cell) = layer(outputs)
            hidden.append(last_hidden[0])
            cells.append(last_cell[0])
        return outputs, hidden, cells


class PartHead(nn.Module):
    """A linear layer on a part of the representation."""

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


@dataclass(frozen=True)
class TinyCnnSettings(ScalableSettings):
    """Settings of `TinyCnn`.

    Attributes
    ----------
    embedding_dim
        p, the width of the last hidden layer.
    norm
        Normalisation after each convolution: ``none``, ``batch`` (BatchNorm) or
        ``group`` (GroupNorm in 8 groups).
    num_poolings
        Number of convolutions that are followed by a 2x2 pooling: 1 (the last), for 8x8
        images, or 2, with which 32x32 images train in a third of the time.
    """

    embedding_dim: PositiveInt = 64
    norm: OptionalNorm = "none"
    num_poolings: Literal[1, 2] = 1


class TinyCnn(Network):
    """Two 3x3 convolutions with pooling, one hidden layer."""

    name = "tiny_cnn"
    title = "Tiny CNN"
    summary = "Two 3x3 convolutions and a hidden layer, for 8x8 digits."
    settings_type = TinyCnnSettings

    def __init__(self, settings: TinyCnnSettings, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self.embedding_dim = settings.scaled(settings.embedding_dim)
        require_multiple(spec, 2**settings.num_poolings, self.name)
        num_poolings = settings.num_poolings
        self.features = _two_convolutions(settings, spec, (16, 32), 3, num_poolings)
        self.classifier = nn.Linear(self.embedding_dim, spec.num_classes)
