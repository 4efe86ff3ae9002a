"""Find the clients whose updates oppose those of all others.

After an explosion over real clients the directions of the updates are compared; their
lengths have been bounded by `screening`. For each round and client, this is the cosine
between the client's direction and the sum of the others' directions, each scaled to
length 1. Where one client flips the sign of its updates, its cosine is clearly negative
and the others' are positive. Where the learning rate is too large, all cosines are
negative, and no client stands out.

A direction has as many numbers as the model. It is reduced to a sketch of 2,048, and
inner products of sketches equal those of directions up to 1/sqrt(2048), or 0.02 (count
sketch: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams",
2002).
"""

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnper.seeding import RandomKey

_SKETCH_LENGTH = 2048
_BLOCK = 512 * _SKETCH_LENGTH  # numbers that are signed at a time
_LEAST_OF_THE_WORST = 0.5  # of the most negative cosine, what makes a suspect, too
Sketch = NDArray[np.float64]


def sketch(
    tensors: Mapping[str, Tensor], origin: Mapping[str, Tensor]
) -> Sketch | None:
    """Sketch the direction of an update; None if it moved no tensor, or not finitely.

    Both arguments are by path. Tensors that are missing in ``origin``, or have another
    shape there, are left out.
    """
    total: Sketch = np.zeros(_SKETCH_LENGTH)
    for path, tensor in tensors.items():
        start = origin.get(path)
        if start is not None and start.shape == tensor.shape:
            total += _sketch_of(tensor.reshape(-1).numpy(), start.reshape(-1).numpy())
    length = float(np.linalg.norm(total))
    return total / length if 0 < length < math.inf else None


def _sketch_of(values: NDArray[np.float32], start: NDArray[np.float32]) -> Sketch:
    """Return the sums of the signed differences over every 2,048th number."""
    total: Sketch = np.zeros(_SKETCH_LENGTH)
    for number, at in enumerate(range(0, len(values), _BLOCK)):
        moved = values[at : at + _BLOCK] - start[at : at + _BLOCK]
        rows = -(-len(moved) // _SKETCH_LENGTH)
        signed = np.zeros(rows * _SKETCH_LENGTH, np.float32)
        np.multiply(moved, _signs(number)[: len(moved)], out=signed[: len(moved)])
        total += signed.reshape(rows, _SKETCH_LENGTH).sum(axis=0, dtype=np.float64)
    return total


@functools.lru_cache(maxsize=64)
def _signs(block: int) -> NDArray[np.int8]:
    """Return random signs, the same for each update, shape (_BLOCK,)."""
    generator = RandomKey(0, ("sketch", block)).numpy()
    return generator.integers(0, 2, _BLOCK, np.int8) * 2 - 1


def agreements(sketches: Mapping[str, Sketch]) -> dict[str, float]:
    """Compute each client's cosine with the sum of the others' directions."""
    total = sum(sketches.values(), start=np.zeros(_SKETCH_LENGTH))
    cosines: dict[str, float] = {}
    for client, own in sketches.items():
        others = total - own
        length = float(np.linalg.norm(others))
        if length > 0:
            cosines[client] = float(own @ others) / length
    return cosines


def suspects(
    rounds: Sequence[Mapping[str, float]], left_out: Iterable[str], num_clients: int
) -> dict[str, float]:
    """Find the clients that oppose all others, with their mean cosines.

    A suspect's mean cosine is negative, and at least half as negative as the lowest.
    There are no suspects if they would be half of all clients or more, together with
    those left out already: the majority is taken to be honest.

    ``rounds``: `agreements` of the last rounds.
    """
    earlier = set(left_out)
    cosines: dict[str, list[float]] = {}
    for of_round in rounds:
        for client, cosine in of_round.items():
            if client not in earlier:
                cosines.setdefault(client, []).append(cosine)
    known = {client: statistics.fmean(values) for client, values in cosines.items()}
    worst = min(known.values(), default=0.0)
    if worst >= 0:
        return {}
    found = {
        client: cosine
        for client, cosine in sorted(known.items())
        if cosine <= _LEAST_OF_THE_WORST * worst
    }
    return found if 2 * (len(found) + len(earlier)) < num_clients else {}
