"""An .npy file written and read some rows at a time.

A mapped file counts as memory of the process for as long as its pages stay; here only
the rows at hand do, however many the file has.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES_AT_ONCE = 16 * 1024**2


class RowFile:
    """A new .npy file that rows are added to; how many need not be known beforehand.

    Parameters
    ----------
    path
        Of the file, which is made.
    row_shape
        The shape of one row.
    dtype
        Of all rows.
    """

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
        """Add ``rows``, shape (n, *row_shape), to the end."""
        given = np.ascontiguousarray(rows, dtype=self._dtype)
        if given.shape[1:] != self._row_shape:
            raise ValueError(f"expected rows {self._row_shape}, found {given.shape}")
        with self._path.open("ab") as file:
            file.write(given.data)
        self._num_rows += len(given)

    def finish(self) -> tuple[int, ...]:
        """End the file, which can then be read, and return its shape."""
        # NumPy pads a header so that its length is the same whatever the first
        # dimension is: this one fits into the place of the one before.
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
    """Read an .npy file in C order, about 16 MB at a time, or a row if that is more."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        row_size = math.prod(shape[1:])
        at_once = max(1, _BYTES_AT_ONCE // max(1, row_size * dtype.itemsize))
        for start in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - start)
            yield np.fromfile(file, dtype, count * row_size).reshape(count, *shape[1:])
