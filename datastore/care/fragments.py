"""Short pieces of bytes that give the whole away, found at any place of any file.

A database may split a row over several pages, move it, or leave a part of it behind. So
not whole rows are looked for but pieces of them, so short that some piece is whole
wherever half a kilobyte of the row is left.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

FRAGMENT_BYTES = 16
"""By chance, the same 16 bytes are nowhere else."""

STRIDE_BYTES = 256
"""There is one fragment in each such part of a row."""

FEWEST_DISTINCT = 6
"""A fragment has so many different bytes at least: a black border says nothing."""

FEWEST_DISTINCT_FIRST = 4
"""And so many in its first half, which is what is looked for at first."""

HEAD_BYTES = 8
"""The first half; what is shorter is not looked for."""

_TABLE_BITS = 22  # a table that fits a processor's cache
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads all bits


class Fragments:
    """The fragments of some secrets.

    Parameters
    ----------
    secrets
        Read once, one after the other; what is kept of them is a sixteenth.

    Attributes
    ----------
    num_secrets
        How many were read.
    unprovable
        Numbers, from 0, of the secrets that have no distinctive fragment, such as an
        image of one colour: their bytes are found anywhere.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._owners: dict[bytes, list[int]] = {}
        self.num_secrets = 0
        self.unprovable: list[int] = []
        for number, secret in enumerate(secrets):
            self._take(number, secret)
            self.num_secrets += 1
        self._lengths = sorted({len(fragment) for fragment in self._owners})
        heads = b"".join(fragment[:HEAD_BYTES] for fragment in self._owners)
        self._heads = np.unique(np.frombuffer(heads, np.uint64))
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[_hashed(self._heads)] = True

    @property
    def all(self) -> set[bytes]:
        """Every fragment."""
        return set(self._owners)

    def owners(self, fragment: bytes) -> list[int]:
        """Return the numbers of the secrets that the fragment is of."""
        return self._owners[fragment]

    def find(self, content: Bytes) -> Iterator[tuple[int, bytes]]:
        """Yield where in ``content``, shape (n,), a fragment begins, and which."""
        if not self._owners:
            return
        places = [
            self._likely(content, shift) * HEAD_BYTES + shift
            for shift in range(HEAD_BYTES)
        ]
        for place in np.sort(np.concatenate(places)).tolist():
            for length in self._lengths:
                fragment = content[place : place + length].tobytes()
                if fragment in self._owners:
                    yield place, fragment

    def _take(self, number: int, secret: bytes) -> None:
        found = distinctive(secret)
        if not found:
            self.unprovable.append(number)
        for fragment in found:
            self._owners.setdefault(fragment, []).append(number)

    def _likely(self, content: Bytes, shift: int) -> NDArray[np.intp]:
        """Return which 8 bytes, counted from ``shift`` on, begin a fragment."""
        count = max(0, len(content) - shift) // HEAD_BYTES
        words = content[shift : shift + count * HEAD_BYTES].view(np.uint64)
        possible = np.flatnonzero(self._table[_hashed(words)])
        found = words[possible]
        nearest = np.searchsorted(self._heads, found)
        # What is larger than all of them is compared with the last.
        certain = self._heads[np.minimum(nearest, len(self._heads) - 1)] == found
        places: NDArray[np.intp] = possible[certain]
        return places


def distinctive(secret: bytes) -> list[bytes]:
    """Return one distinctive fragment of each part of ``secret`` that has one.

    A secret that is shorter than a fragment is one itself.
    """
    if len(secret) < FRAGMENT_BYTES:
        padded = np.frombuffer(secret, np.uint8)[None]
        long_enough = len(secret) >= HEAD_BYTES
        return [secret] if long_enough and _is_distinctive(padded)[0] else []
    content = np.frombuffer(secret, np.uint8)
    num_windows = len(content) // FRAGMENT_BYTES
    windows = content[: num_windows * FRAGMENT_BYTES].reshape(-1, FRAGMENT_BYTES)
    good = np.flatnonzero(_is_distinctive(windows))
    parts = good * FRAGMENT_BYTES // STRIDE_BYTES
    first = np.unique(parts, return_index=True)[1]
    return [windows[place].tobytes() for place in good[first].tolist()]


def _is_distinctive(windows: Bytes) -> NDArray[np.bool_]:
    enough: NDArray[np.bool_] = _num_distinct(windows) >= FEWEST_DISTINCT
    return enough & (_num_distinct(windows[:, :HEAD_BYTES]) >= FEWEST_DISTINCT_FIRST)


def _num_distinct(rows: Bytes) -> NDArray[np.intp]:
    ordered = np.sort(rows, axis=1)
    steps = ordered[:, 1:] != ordered[:, :-1]
    counts: NDArray[np.intp] = 1 + steps.sum(axis=1, dtype=np.intp)
    return counts


def _hashed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (words * _MULTIPLIER) >> np.uint64(64 - _TABLE_BITS)
