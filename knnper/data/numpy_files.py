"""Read untrusted .npz and .npy files safely, and write .npy files row by row."""

import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

Array = NDArray[np.generic]
_HEADERS: Mapping[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    SyntaxError,
    MemoryError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of NumPy and zipfile on damaged or encrypted files and other content."""
_LARGE_BYTES, _LARGEST_RATIO = 2**30, 200
"""Larger than this in bytes, and in relation to its size, an unpacked archive is
rejected as a decompression bomb. Deflate compresses zeros to 1/1032 of their size."""
_BYTES_AT_ONCE = 16 * 1024**2


def load_arrays(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Load the arrays called ``names`` from an .npz file, as far as they exist."""
    # np.load would take other files for a single array or a pickle.
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path} cannot be read as .npz: it is not an archive",
            reason=SafeReason(Code.UNREADABLE_FILE),
        )
    try:
        _require_stated_sizes(path, names)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except _DAMAGE as error:
        raise _unreadable(path, "an archive") from error


def load_array(path: Path) -> Array:
    """Load the array of an .npy file; raise a `DataError` if it is damaged."""
    try:
        with path.open("rb") as file:
            _require_stated_size(file, path.stat().st_size)
        array: Array = np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise _unreadable(path, "an array") from error
    return array


def _require_stated_sizes(path: Path, names: Collection[str]) -> None:
    """Reject arrays of another size than their headers claim, before allocating it."""
    with zipfile.ZipFile(path) as archive:
        members = [
            member
            for member in archive.infolist()
            if member.filename.removesuffix(".npy") in names
        ]
        for member in members:
            with archive.open(member) as file:
                _require_stated_size(file, member.file_size)
    num_bytes = sum(member.file_size for member in members)
    if num_bytes > max(_LARGE_BYTES, _LARGEST_RATIO * path.stat().st_size):
        raise DataError(
            f"{path} expands to {num_bytes / 1e9:.1f} GB, more than {_LARGEST_RATIO} "
            "times its size, and is not read; save its arrays with numpy.savez, "
            "without compression, if that is right"
        )


def _require_stated_size(file: IO[bytes], num_bytes: int) -> None:
    """Reject an .npy file of ``num_bytes`` if its header claims another size."""
    shape, _, dtype = _HEADERS[npy.read_magic(file)](file)
    # A hostile header may have negative dimensions.
    stated = math.prod(shape) * dtype.itemsize if min(shape, default=0) >= 0 else -1
    if not dtype.hasobject and stated != num_bytes - file.tell():
        raise ValueError(
            f"expected {stated} bytes of an array of shape {shape}, found "
            f"{num_bytes - file.tell()}"
        )


def _unreadable(path: Path, expected: str) -> DataError:
    return DataError(
        f"{path} cannot be read as {path.suffix}: it is damaged, or not {expected} of "
        "numbers or texts that NumPy saved",
        reason=SafeReason(Code.UNREADABLE_FILE),
    )


class RowFile:
    """Writes an .npy file row by row, without a known number of rows."""

    def __init__(
        self, path: Path, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._path = path
        self._row_shape = row_shape
        self._dtype = dtype
        self._num_rows = 0
        path.touch(exist_ok=False)
        self._write_header()

    def append(self, rows: NDArray[Any]) -> None:
        """Append ``rows``, shape (n, *row_shape)."""
        contiguous = np.ascontiguousarray(rows, dtype=self._dtype)
        if contiguous.shape[1:] != self._row_shape:
            raise ValueError(
                f"expected rows {self._row_shape}, found {contiguous.shape}"
            )
        with self._path.open("ab") as file:
            file.write(contiguous.data)
        self._num_rows += len(contiguous)

    def finish(self) -> tuple[int, ...]:
        """Write the final header and return the shape of the array."""
        # NumPy pads headers for any first dimension to the same length, so the new
        # header exactly replaces the first one.
        self._write_header()
        return (self._num_rows, *self._row_shape)

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_rows, *self._row_shape),
        }
        with self._path.open("r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)


def rows_in_parts(path: Path) -> Iterator[NDArray[Any]]:
    """Yield the rows of an .npy file (C order) in parts of 16 MB or of one row."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        row_size = math.prod(shape[1:])
        at_once = max(1, _BYTES_AT_ONCE // max(1, row_size * dtype.itemsize))
        for start in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - start)
            yield np.fromfile(file, dtype, count * row_size).reshape(count, *shape[1:])
