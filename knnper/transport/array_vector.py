"""The numbers in one of Flower's arrays, looked at before they are copied."""

import math
import re

import numpy as np
import torch
from flwr.app import Array
from flwr.common.constant import SType
from torch import Tensor

from knnper.config.errors import CodecError

_MOST_HEADER_BYTES = 4096
# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0;
# NumPy's own reader sets aside what the header promises before it looks for it.
_BEGIN = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<f4', 'fortran_order': (?:False|True), "
    rb"'shape': \((?P<length>\d{1,15}),\), \} *\n",
    re.DOTALL,
)


def vector_of(array: Array | None, most_bytes: float = math.inf) -> Tensor:
    """Return the float32 vector in an array that somebody sent; shape (d,).

    Nothing is set aside for numbers that did not arrive.

    Raises
    ------
    CodecError
        If there is none, it holds something else, or has more than ``most_bytes``.
    """
    if array is None:
        raise CodecError("expected an array of numbers, found none")
    if array.dtype != "float32" or array.stype != SType.NUMPY or len(array.shape) != 1:
        raise CodecError(
            f"expected a float32 vector as {SType.NUMPY}, found {array.dtype} of "
            f"{len(array.shape)} axes as {array.stype}"
        )
    if len(array.data) > most_bytes + _MOST_HEADER_BYTES:
        raise CodecError(
            f"expected at most {most_bytes:g} bytes, found {len(array.data)}"
        )
    numbers = _numbers(array.data)
    if (len(numbers),) != tuple(array.shape):
        raise CodecError(f"expected {array.shape[0]} numbers, found {len(numbers)}")
    vector = torch.empty(len(numbers))
    vector.numpy()[:] = numbers
    return vector


def _numbers(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return a view of the numbers in an NPY file of a float32 vector."""
    begin = _BEGIN.match(data)
    if begin is None:
        raise CodecError("expected a float32 vector as NumPy saves it")
    found, expected = len(data) - begin.end(), 4 * int(begin["length"])
    if found != expected:
        raise CodecError(f"expected numbers in {expected} bytes, found {found}")
    return np.frombuffer(data, np.dtype("<f4"), offset=begin.end())
