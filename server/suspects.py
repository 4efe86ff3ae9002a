"""Which clients push the model against all others.

When a training over real clients has exploded, the clients are told apart by the
direction of their updates, not by their length, which `screening` has bounded. Of each
round that led there a client has the cosine between its own direction and the sum of
the others' directions, each of length 1: a client that turns its update round has a
clearly negative one, all others have positive ones. Where the learning rate is too
large, all have negative ones, and nobody stands out.

A direction is as long as the model. It is kept as a sketch of 2,048 numbers, whose
inner products are those of the directions up to 1/sqrt(2048), or 0.02 (count sketch:
Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002).
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
_LEAST_OF_THE_WORST = 0.5  # of the most negative cosine, what makes a suspect, too
Sketch = NDArray[np.float64]


def sketch(
    tensors: Mapping[str, Tensor], origin: Mapping[str, Tensor]
) -> Sketch | None:
    """Return the direction in which an update moved what its client was sent.

    None where it moved nothing of it. Both arguments are by path.
    """
    total: Sketch = np.zeros(_SKETCH_LENGTH)
    for path, tensor in tensors.items():
        start = origin.get(path)
        if start is None or start.shape != tensor.shape:
            continue
        moved = (tensor - start).reshape(-1).numpy()
        rows = -(-len(moved) // _SKETCH_LENGTH)
        signed = np.zeros(rows * _SKETCH_LENGTH, np.float32)
        np.multiply(moved, _signs(len(moved)), out=signed[: len(moved)])
        total += signed.reshape(rows, _SKETCH_LENGTH).sum(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(total))
    return total / length if 0 < length < math.inf else None


@functools.lru_cache(maxsize=16)
def _signs(length: int) -> NDArray[np.float32]:
    generator = RandomKey(0, ("sketch", length)).numpy()
    return generator.integers(0, 2, length).astype(np.float32) * 2 - 1


def agreements(sketches: Mapping[str, Sketch]) -> dict[str, float]:
    """Return each client's cosine with the sum of the others' directions."""
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
    """Return the clients that push the model against all others, with their cosines.

    Those whose mean cosine is negative, and at least half as negative as the most
    negative one. Nobody, if with those that are left out already they would be half of
    all clients or more: honest ones are taken to be the majority.

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
