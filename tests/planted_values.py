"""Search for private values in bytes: values of an example, wherever they begin."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# Values in a row that are looked for, and bits of a value that are not compared.
WINDOW = {"uint8": 32, "float32": 8, "float64": 8}
IGNORED_BITS = {"uint8": 0, "float32": 12, "float64": 41}
# Fewer occur by chance, as a row of equal pixels or of zeros does.
FEWEST_DISTINCT = 4


class PlantedValues:
    """Values that may not be sent, and parts of them.

    Numbers of a type are compared by their leading bits, since the last bits of an
    embedding depend on what it is computed together with.

    Parameters
    ----------
    values
        One row each, shape (n, ...), all of the type in which they are looked for.
    window
        How many values in a row are looked for; by default that of the type.
    """

    def __init__(self, values: NDArray[np.generic], window: int = 0) -> None:
        self._type = values.dtype
        self._window = window or WINDOW[values.dtype.name]
        rows = _leading_bits(values).reshape(len(values), -1)
        self._windows = {
            row[start : start + self._window].tobytes()
            for row in rows
            # Whoever sends two of these parts in a row sends one as a whole.
            for start in range(0, rows.shape[1] - self._window + 1, self._window)
            if len(set(row[start : start + self._window])) >= FEWEST_DISTINCT
        }
        parts = [np.frombuffer(part, np.uint32) for part in self._windows]
        self._beginnings = np.array([_pairs(part)[0] for part in parts], np.uint64)

    def __len__(self) -> int:
        return len(self._windows)

    def count_in(self, bodies: Iterable[bytes]) -> int:
        """Return how many different parts the bodies hold."""
        return len({part for body in bodies for part in self._parts_of(body)})

    def _parts_of(self, body: bytes) -> set[bytes]:
        size = self._type.itemsize
        return {
            part
            for offset in range(size)
            if (num_values := (len(body) - offset) // size) >= self._window
            for part in self._parts_from(body, offset, num_values)
        }

    def _parts_from(self, body: bytes, offset: int, num_values: int) -> set[bytes]:
        values = np.frombuffer(body, self._type, num_values, offset)
        bits = _leading_bits(values)
        # Few places begin as a part does.
        starts = np.flatnonzero(np.isin(_pairs(bits), self._beginnings))
        return self._windows.intersection(
            bits[start : start + self._window].tobytes() for start in starts
        )


def _pairs(bits: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return each number and the one after it as one number."""
    wide = bits.astype(np.uint64)
    return wide[:-1] << np.uint64(32) | wide[1:]


def _leading_bits(values: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Return sign, exponent and 11 bits of the mantissa; a byte as it is."""
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    return (bits >> IGNORED_BITS[values.dtype.name]).astype(np.uint32)
