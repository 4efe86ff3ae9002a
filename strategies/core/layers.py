"""The layers of a model, counted as methods count them that treat some apart."""

from collections.abc import Mapping

from torch import Tensor, nn

from knnper.config.errors import ConfigError, Problem
from knnper.models.flat import FlatModel


def first_layers(model: FlatModel, num_layers: int) -> Tensor:
    """Return which weights belong to the first layers, bool of shape (num_weights,).

    A layer is a module with weight matrices or kernels, and the modules with vectors
    only, such as normalisation, that come between it and the next. They are counted in
    the order in which the model defines them, those of the head last.
    """
    numbers = _layer_numbers(model)
    return model.mask(lambda module: numbers[module] <= num_layers)


def layers_left(model: FlatModel, num_taken: int, setting: str) -> int:
    """Return how many layers a model has beside so many of them.

    Parameters
    ----------
    model
        See `first_layers` for what is a layer.
    num_taken
        How many layers are kept personal.
    setting
        Name of the method's setting that says so.

    Raises
    ------
    ConfigError
        If none is left to be shared.
    """
    num_layers = max(_layer_numbers(model).values())
    if num_taken >= num_layers:
        message = (
            f"found {num_taken}, expected at most {num_layers - 1}: of the model's "
            f"{num_layers} layers at least one is shared; give fewer, or choose the "
            "method local, which shares nothing"
        )
        raise ConfigError([Problem(f"method.{setting}", message)])
    return num_layers - num_taken


def _layer_numbers(model: FlatModel) -> Mapping[nn.Module, int]:
    """Return the number, from 1, of the layer of each module that owns weights."""
    most_axes: dict[nn.Module, int] = {}
    for entry in model.entries:
        axes = len(entry.shape) if entry.is_parameter else 0
        most_axes[entry.module] = max(most_axes.get(entry.module, 0), axes)
    head = set(model.module.classifier.modules())
    numbers: dict[nn.Module, int] = {}
    last = 0
    for module in sorted(model.module.modules(), key=lambda one: one in head):
        if module in most_axes:
            last += most_axes[module] > 1
            numbers[module] = max(last, 1)
    return numbers
