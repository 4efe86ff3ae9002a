"""What a data set must look like for a model to take it."""

from collections.abc import Collection, Sequence

from knnper.config.errors import ConfigError, Problem
from knnper.data.examples import KINDS_OF_INPUT, InputDtype, InputSpec


def require_type(spec: InputSpec, allowed: Sequence[InputDtype], model: str) -> None:
    """Refuse inputs whose type is not among ``allowed``.

    Raises
    ------
    ConfigError
        With the kind of input that was found.
    """
    if spec.dtype not in allowed:
        expected = " or ".join(KINDS_OF_INPUT[dtype] for dtype in allowed)
        raise _problem(
            f"{model} takes {expected}, found {KINDS_OF_INPUT[spec.dtype]}; choose "
            "another model or data set"
        )


def require_multiple(spec: InputSpec, factor: int, model: str) -> None:
    """Refuse images whose height or width is not a positive multiple of ``factor``.

    Raises
    ------
    ConfigError
        With the size that was found.
    """
    height, width, _ = spec.image_shape
    if min(height, width) < factor or height % factor or width % factor:
        raise _problem(
            f"{model} takes images whose height and width are multiples of {factor}, "
            f"found {height}x{width}; choose another model or data set"
        )


def require_size(spec: InputSpec, smallest: int, model: str) -> None:
    """Refuse images with a height or width of less than ``smallest``.

    Raises
    ------
    ConfigError
        With the size that was found.
    """
    height, width, _ = spec.image_shape
    if min(height, width) < smallest:
        raise _problem(
            f"{model} takes images of {smallest}x{smallest} pixels and more, found "
            f"{height}x{width}; choose another model or data set"
        )


def require_channels(spec: InputSpec, allowed: Collection[int], model: str) -> None:
    """Refuse images whose number of channels is not among ``allowed``.

    Raises
    ------
    ConfigError
        With the number that was found.
    """
    channels = spec.image_shape[2]
    if channels not in allowed:
        expected = " or ".join(str(number) for number in allowed)
        raise _problem(
            f"{model} takes images with {expected} channels, found {channels}; "
            "choose another model or data set"
        )


def _problem(message: str) -> ConfigError:
    return ConfigError([Problem("model", message)])
