"""Inputs that are sent as numbers: nested lists, and NumPy's file format."""

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from client.service.problems import RequestError

LARGEST_FLOAT = float(np.finfo(np.float32).max)
_NPY_TYPES = {"uint8": ("uint8",), "float32": ("float32", "float64")}


def from_lists(
    given: Any, shape: tuple[int, ...], dtype: str, where: str
) -> NDArray[Any]:
    """Return nested lists as an array.

    Parameters
    ----------
    given
        As read from JSON.
    shape
        That is expected.
    dtype
        ``uint8`` takes whole numbers from 0 to 255, ``float32`` any that it can hold.
    where
        Names the input in messages.

    Raises
    ------
    RequestError
        422 with the first thing that is wrong.
    """
    numbers = _flattened(given, shape, where)
    if not set(map(type, numbers)) <= {int, float}:
        odd = next(one for one in numbers if type(one) not in (int, float))
        raise RequestError(422, f"{where}: expected numbers, found {_shown(odd)}")
    lowest, highest = (0, 255) if dtype == "uint8" else (-LARGEST_FLOAT, LARGEST_FLOAT)
    if not lowest <= min(numbers) <= max(numbers) <= highest:
        raise RequestError(
            422, f"{where}: expected numbers from {lowest:g} to {highest:g}"
        )
    array = np.array(numbers, np.float64)
    if dtype == "uint8" and (array % 1).any():
        raise RequestError(422, f"{where}: expected whole numbers, found fractions")
    return array.astype(dtype).reshape(shape)


def _flattened(given: Any, shape: tuple[int, ...], where: str) -> Sequence[Any]:
    level: Sequence[Any] = [given]
    for axis, length in enumerate(shape):
        for one in level:
            if not isinstance(one, list) or len(one) != length:
                raise RequestError(
                    422,
                    f"{where}: expected lists nested as {shape}, found "
                    f"{_shown(one)} where {length} entries of axis {axis} belong",
                )
        level = list(itertools.chain.from_iterable(level))
    return level


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def from_npy(content: bytes, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return one input, or several of them, of a file of `numpy.save`.

    Parameters
    ----------
    content
        The file.
    shape
        Of one input.
    dtype
        That is expected; float64 is taken for float32, too.

    Returns
    -------
    numpy.ndarray
        Of this type, shape (n, ...).

    Raises
    ------
    RequestError
        400 if it is no such file or is cut short, 422 if it is another array than
        expected. Nothing in it is run.
    """
    found_shape, fortran_order, found_type, data = _read_npy(content)
    names = _NPY_TYPES[dtype]
    if found_type not in [np.dtype(name) for name in names]:
        raise RequestError(
            422, f"expected an array of {' or '.join(names)}, found {found_type}"
        )
    if found_shape != shape and found_shape[1:] != shape:
        raise RequestError(
            422,
            f"expected an array of shape {shape} or (n, *{shape}), found {found_shape}",
        )
    if math.prod(found_shape) * found_type.itemsize != len(data):
        raise RequestError(400, "the array is cut short, or more follows it")
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    array = np.frombuffer(data, found_type).reshape(found_shape, order=order)
    return _finite(array, dtype).reshape(-1, *shape)


def _finite(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return the array in the type; refuse what it cannot hold."""
    if dtype == "float32" and not (np.abs(array) <= LARGEST_FLOAT).all():
        raise RequestError(422, "expected numbers that float32 can hold, no NaN")
    return np.array(array, dtype, order="C")


def _read_npy(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], bytes]:
    file = io.BytesIO(content)
    try:
        version = npy.read_magic(file)
        read = (
            npy.read_array_header_1_0
            if version == (1, 0)
            else npy.read_array_header_2_0
        )
        shape, fortran_order, dtype = read(file)
    # A damaged header is parsed as Python's literals are.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise RequestError(
            400, f"expected a file of numpy.save, found what cannot be read: {error}"
        ) from error
    if dtype.hasobject or any(length < 0 for length in shape):
        raise RequestError(422, f"expected an array of numbers, found {dtype}")
    return shape, fortran_order, dtype, content[file.tell() :]
