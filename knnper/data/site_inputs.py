"""The inputs of a site, read once labels and splits are known."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import (
    KINDS_OF_INPUT,
    LARGEST_PIXEL,
    InputDtype,
    InputSpec,
    Vocabulary,
)
from knnper.data.site_task import SiteTask
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

InputForm = tuple[tuple[int, int, int], InputDtype]
"""Shape of one input, and type."""
_NUMBERS = "biuf"  # NumPy's letters for truth values, integers and floats


class ReadInputs(NamedTuple):
    """Inputs in memory."""

    # The readable inputs in the order of the request, (m, height, width, channels), of
    # the task's type.
    images: Tensor
    unreadable: Mapping[int, str] = {}  # errors of the others by position in the data


class SiteInputs(ABC):
    """Inputs that are read later, once labels and splits are known."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of tokenised text; None for other inputs."""
        return None

    @abstractmethod
    def form(self) -> InputForm:
        """Return shape and type of the inputs as they are, for data without a task."""

    @abstractmethod
    def read(
        self, positions: Sequence[int], task: SiteTask, cache: Path | None = None
    ) -> ReadInputs:
        """Read the inputs at ``positions`` in the form of ``task``."""


@dataclass(frozen=True, eq=False)
class ArrayInputs(SiteInputs):
    """Inputs in one array of numbers, shape (n, ...); ``source`` is for errors."""

    source: str
    array: NDArray[Any]

    def form(self) -> InputForm:
        """Infer (height, width, channels) from the number of dimensions."""
        dtype: InputDtype = "uint8" if self.array.dtype == np.uint8 else "float32"
        match self.array.shape[1:]:
            case (num_features,):
                return (1, 1, num_features), dtype
            case (height, width):
                return (height, width, 1), dtype
            case (height, width, channels):
                return (height, width, channels), dtype
        raise DataError(
            f"{self.source}: found inputs of shape {_format_shape(self.array.shape)}, "
            "expected (n, height, width, channels), (n, height, width) or (n, "
            "features)",
            reason=SafeReason(Code.WRONG_SHAPE),
        )

    def select(self, features: Sequence[int]) -> "ArrayInputs":
        """Return rows (n, d) with only the features at these positions, in order."""
        rows = self.array.reshape(len(self.array), -1)
        return replace(self, array=rows[:, list(features)])

    @override
    def read(
        self,
        positions: Sequence[int],
        task: SiteTask,
        cache: Path | None = None,
    ) -> ReadInputs:
        chosen = self.array[np.asarray(positions, dtype=np.int64)]
        fitted = fit_inputs(chosen, task.spec, self.source)
        return ReadInputs(torch.from_numpy(fitted))


def fit_inputs(array: NDArray[Any], spec: InputSpec, source: str) -> NDArray[Any]:
    """Convert numbers to the form of ``spec``, without a copy if they have it.

    ``array`` has shape (n, height, width, channels), (n, height, width) for one
    channel, or (n, height * width * channels). Values must be finite for ``float32``,
    else whole numbers from 0 to `InputSpec.largest_whole`.
    """
    height, width, channels = spec.image_shape
    shapes = {(height, width, channels), (math.prod(spec.image_shape),)}
    if channels == 1:
        shapes.add((height, width))
    if array.dtype.kind not in _NUMBERS or array.shape[1:] not in shapes:
        raise DataError(
            f"{source}: found inputs {array.dtype} of shape "
            f"{_format_shape(array.shape)}, expected {spec.dtype} of shape "
            f"{_format_shape(('n', *spec.image_shape))}, as the federation agreed",
            reason=SafeReason(Code.WRONG_SHAPE),
        )
    shaped = array.reshape(len(array), *spec.image_shape)
    if spec.dtype == "float32":
        return _require_finite(shaped, source)
    largest = spec.largest_whole
    if array.dtype != np.uint8 or largest < LARGEST_PIXEL:
        with np.errstate(invalid="ignore"):
            wrong = ~((shaped >= 0) & (shaped <= largest) & (shaped % 1 == 0))
        if wrong.any():
            raise DataError(
                f"{source}: found {int(wrong.sum())} values in the inputs such as "
                f"{shaped[wrong][0]}, expected whole numbers from 0 to {largest}: the "
                f"federation agreed on {KINDS_OF_INPUT[spec.dtype]}",
                reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=int(wrong.sum())),
            )
    return shaped.astype(spec.stored_dtype, copy=False)


def _require_finite(array: NDArray[Any], source: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        reals = array.astype(np.float32, copy=False)
    wrong = int((~np.isfinite(reals)).sum())
    if wrong:
        raise DataError(
            f"{source}: {wrong} values in the inputs are missing, infinite or too "
            "large for float32; fill them in, or leave these examples out",
            reason=SafeReason(Code.VALUE_NOT_ALLOWED, count=wrong),
        )
    return reals


def _format_shape(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"
