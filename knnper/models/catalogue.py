"""The models that can be chosen by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from knnper.data.examples import KINDS_OF_INPUT, InputDtype, InputSpec
from knnper.experiment import Choice, Settings
from knnper.models import networks
from knnper.models.flat import EmbeddingModel, FlatModel, ModelSettings, require_input
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
        settings_type=networks.LeafCnnSettings,
        build=networks.LeafCnn,
    ),
    "tiny_cnn": ModelSpec(
        title="Tiny CNN",
        summary="Two 3x3 convolutions and a hidden layer, for 8x8 digits.",
        settings_type=networks.TinyCnnSettings,
        build=networks.TinyCnn,
    ),
    "small_resnet": ModelSpec(
        title="Small ResNet",
        summary="Four convolutions and a residual block, for 32x32 images on CPUs.",
        settings_type=networks.SmallResNetSettings,
        build=networks.SmallResNet,
    ),
    "mobilenet_v2": ModelSpec(
        title="MobileNetV2",
        summary="The paper's network for CIFAR; embeddings of 1280 numbers.",
        settings_type=networks.MobileNetV2Settings,
        build=networks.MobileNetV2,
    ),
    "resnet18": ModelSpec(
        title="ResNet-18",
        summary="For photographs, or small images with its other stem; p is 512.",
        settings_type=networks.ResNet18Settings,
        build=networks.ResNet18,
    ),
    "mlp": ModelSpec(
        title="MLP",
        summary="Fully connected hidden layers, for rows of features or images.",
        settings_type=networks.MlpSettings,
        build=networks.Mlp,
    ),
    "softmax_regression": ModelSpec(
        title="Softmax regression",
        summary="One linear layer on the inputs as they are, features or images.",
        settings_type=networks.SoftmaxRegressionSettings,
        build=networks.SoftmaxRegression,
    ),
    "stacked_lstm": ModelSpec(
        title="Stacked LSTM",
        summary="LEAF's network for the next character; embeddings of 1024 numbers.",
        settings_type=networks.StackedLstmSettings,
        build=networks.StackedLstm,
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
    kinds = " or ".join(KINDS_OF_INPUT[dtype] for dtype in entry.takes)
    holds = spec.dtype in entry.takes
    require_input(spec, choice.name, holds=holds, expected=kinds)
    with rng.torch():
        module = entry.build(settings, spec)
    if settings.weights is not None:
        networks.load_weights(module, Path(settings.weights))
    return FlatModel(module, device)
