"""The models that can be chosen by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from knnper.data.examples import InputDtype, InputSpec
from knnper.experiment import Choice, Settings
from knnper.models.flat import EmbeddingModel, FlatModel, ModelSettings, require_type
from knnper.models.networks import (
    LeafCnn,
    LeafCnnSettings,
    Mlp,
    MlpSettings,
    MobileNetV2,
    MobileNetV2Settings,
    ResNet18,
    ResNet18Settings,
    SmallResNet,
    SmallResNetSettings,
    SoftmaxRegression,
    SoftmaxRegressionSettings,
    StackedLstm,
    StackedLstmSettings,
    TinyCnn,
    TinyCnnSettings,
    load_weights,
)
from knnper.seeding import RandomKey


@dataclass(frozen=True)
class ModelSpec:
    """An entry in the table of models.

    Attributes
    ----------
    title
        The model's name as papers write it.
    summary
        One sentence.
    settings_type
        What the section ``model`` of an experiment takes beside the name.
    build
        ``(settings, spec) -> EmbeddingModel`` with random weights, drawn from torch's
        generator.
    takes
        The types of inputs that it is made for.
    """

    title: str
    summary: str
    settings_type: type[ModelSettings]
    build: Callable[[Any, InputSpec], EmbeddingModel]
    takes: tuple[InputDtype, ...] = ("uint8", "float32")


MODELS: Mapping[str, ModelSpec] = {
    "leaf_cnn": ModelSpec(
        title="LEAF CNN",
        summary="Two 5x5 convolutions and a hidden layer, for 28x28 or 32x32 images.",
        settings_type=LeafCnnSettings,
        build=LeafCnn,
    ),
    "tiny_cnn": ModelSpec(
        title="Tiny CNN",
        summary="Two 3x3 convolutions and a hidden layer, for 8x8 digits.",
        settings_type=TinyCnnSettings,
        build=TinyCnn,
    ),
    "small_resnet": ModelSpec(
        title="Small ResNet",
        summary="Four convolutions and a residual block, for 32x32 images on CPUs.",
        settings_type=SmallResNetSettings,
        build=SmallResNet,
    ),
    "mobilenet_v2": ModelSpec(
        title="MobileNetV2",
        summary="The paper's network for CIFAR; embeddings of 1280 numbers.",
        settings_type=MobileNetV2Settings,
        build=MobileNetV2,
    ),
    "resnet18": ModelSpec(
        title="ResNet-18",
        summary="For photographs, or small images with its other stem; p is 512.",
        settings_type=ResNet18Settings,
        build=ResNet18,
    ),
    "mlp": ModelSpec(
        title="MLP",
        summary="Fully connected hidden layers, for rows of features or images.",
        settings_type=MlpSettings,
        build=Mlp,
    ),
    "softmax_regression": ModelSpec(
        title="Softmax regression",
        summary="One linear layer on the inputs as they are, features or images.",
        settings_type=SoftmaxRegressionSettings,
        build=SoftmaxRegression,
    ),
    "stacked_lstm": ModelSpec(
        title="Stacked LSTM",
        summary="LEAF's network for the next character; embeddings of 1024 numbers.",
        settings_type=StackedLstmSettings,
        build=StackedLstm,
        takes=("token",),
    ),
}


def build_model(
    choice: Choice[Settings],
    spec: InputSpec,
    rng: RandomKey,
    device: torch.device = torch.device("cpu"),
) -> FlatModel:
    """Return the chosen model, initialised.

    Parameters
    ----------
    choice
        A name of `MODELS` with its settings.
    spec
        Shape of the images and number of classes.
    rng
        Fixes the random initial weights, which are the same on every device.
    device
        Where the model computes.
    """
    entry, settings = MODELS[choice.name], choice.settings
    if not isinstance(settings, entry.settings_type):
        raise TypeError(
            f"{choice.name} takes {entry.settings_type.__name__}, "
            f"found {type(settings).__name__}"
        )
    require_type(spec, entry.takes, choice.name)
    with rng.torch():
        module = entry.build(settings, spec)
    if settings.weights is not None:
        load_weights(module, Path(settings.weights))
    return FlatModel(module, device)
