"""Inputs that lie in memory as one array, and the forms that they can be brought to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.data.examples import KINDS_OF_INPUT, InputSpec
from knnper.data.site.agreement import SiteTask
from knnper.data.site.collected import InputForm, ReadInputs

_NUMBERS = "biuf"  # NumPy's letters for truth values, integers and floats
_LARGEST_PIXEL = 255


@dataclass(frozen=True, eq=False)
class ArrayInputs:
    """Inputs as one array.

    Attributes
    ----------
    source
        Named in errors.
    array
        Numbers, shape (n, ...).
    """

    source: str
    array: NDArray[Any]

    def form(self) -> InputForm:
        """See `knnper.data.site.collected.Inputs`."""
        shape = _image_shape(self.array, self.source)
        is_image = self.array.dtype == np.uint8
        return InputForm(shape, "uint8" if is_image else "float32")

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `knnper.data.site.collected.Inputs`."""
        chosen = self.array[np.asarray(positions, dtype=np.int64)]
        fitted = fit_inputs(chosen, task.spec, self.source)
        return ReadInputs(torch.from_numpy(fitted))

    def kept_in(self, folder: Path) -> "ArrayInputs":  # noqa: ARG002 - quick to read
        """See `knnper.data.site.collected.Inputs`."""
        return self


def fit_inputs(array: NDArray[Any], spec: InputSpec, source: str) -> NDArray[Any]:
    """Return ``array`` in the form that ``spec`` asks for; itself where it has it.

    Parameters
    ----------
    array
        Numbers, shape (n, height, width, channels), without the channels where there
        is one, or (n, height * width * channels).

    Raises
    ------
    DataError
        If the shape is another one, or the values do not fit: whole numbers from 0 to
        255 for ``uint8``, to c - 1 for ``token``, finite ones for ``float32``.
    """
    height, width, channels = spec.image_shape
    shapes = {(height, width, channels), (math.prod(spec.image_shape),)}
    if channels == 1:
        shapes.add((height, width))
    if array.dtype.kind not in _NUMBERS or array.shape[1:] not in shapes:
        raise DataError(
            f"{source}: found inputs {array.dtype} of shape {_shown(array.shape)}, "
            f"expected {spec.dtype} of shape {_shown(('n', *spec.image_shape))}, "
            "as the federation agreed"
        )
    shaped = array.reshape(len(array), *spec.image_shape)
    if spec.dtype == "float32":
        return _reals(shaped, source)
    largest = _LARGEST_PIXEL if spec.dtype == "uint8" else spec.num_classes - 1
    if array.dtype != np.uint8 or largest < _LARGEST_PIXEL:
        _require_whole(shaped, largest, KINDS_OF_INPUT[spec.dtype], source)
    return shaped.astype(np.uint8, copy=False)


def _require_whole(array: NDArray[Any], largest: int, kind: str, source: str) -> None:
    with np.errstate(invalid="ignore"):
        wrong = ~((array >= 0) & (array <= largest) & (array % 1 == 0))
    if wrong.any():
        raise DataError(
            f"{source}: found {int(wrong.sum())} values in the inputs such as "
            f"{array[wrong][0]}, expected whole numbers from 0 to {largest}: the "
            f"federation agreed on {kind}"
        )


def _reals(array: NDArray[Any], source: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        reals = array.astype(np.float32, copy=False)
    wrong = int((~np.isfinite(reals)).sum())
    if wrong:
        raise DataError(
            f"{source}: {wrong} values in the inputs are missing, infinite or too "
            "large for float32; fill them in, or leave their examples out"
        )
    return reals


def _image_shape(array: NDArray[Any], source: str) -> tuple[int, int, int]:
    """Return (height, width, channels), as the number of dimensions suggests."""
    shape = tuple(array.shape[1:])
    if len(shape) == 1:
        return 1, 1, shape[0]
    if len(shape) == 2:
        return *shape, 1
    if len(shape) == 3:
        return shape
    raise DataError(
        f"{source}: found inputs of shape {_shown(array.shape)}, expected (n, height, "
        "width, channels), (n, height, width) or (n, features)"
    )


def _shown(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"
