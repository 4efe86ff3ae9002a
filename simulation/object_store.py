"""A carrier of models through Ray's object store, for clusters of machines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import Tensor

from knnper.transport.messages import VECTOR, Carrier, Packed, copied, too_large

if TYPE_CHECKING:
    from ray import ObjectRef


class _Numbers(Array):
    """A float32 vector that Ray carries beside a message, or a reference to one."""

    # Flower hands messages on to Ray as objects, which its documentation does not
    # promise; numbers that it left out would be missed by whoever reads them. Ray finds
    # arrays and references in a message by itself. An array goes into its store as it
    # is, neither saved nor pickled. A reference is counted: what it refers to lives as
    # long as there is one, and no longer. With 100 clients and 9 MB, on two nodes, a
    # round that only moves models takes 1.1 s so, and 2.8 s with them in messages.

    def __init__(self, held: NDArray[np.float32] | ObjectRef[Any], length: int) -> None:
        super().__init__("float32", (length,), "ray", b"")
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.held, *self.shape)


def _arrived(held: NDArray[np.float32] | ObjectRef[Any], length: int) -> _Numbers:
    # Copied at once: as long as there is a view, the store keeps what is viewed.
    if isinstance(held, np.ndarray):
        held = copied(held).numpy()
    return _Numbers(held, length)


class ObjectStore(Carrier):
    """Numbers in Ray's object store, by which they get to all machines of a cluster.

    Parameters
    ----------
    shares
        Whether many read what is put: then a message holds a reference, and each
        machine fetches the numbers once. A reply, which one process reads, goes into
        the store with the message; so it is there even if its worker has died since.
    """

    name = "object_store"

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares

    def put(self, vector: Tensor, entry: ConfigRecord) -> ArrayRecord:  # noqa: ARG002
        """See `Carrier.put`."""
        # It imports Ray, which a server of real clients does without.
        import ray

        numbers = vector.numpy()
        # A message is taken apart later, when a client's memory may be the next one's.
        held = ray.put(numbers) if self._shares else numbers.copy()
        record = ArrayRecord()
        record[VECTOR] = _Numbers(held, len(numbers))  # the constructor would copy it
        return record

    def place(self, packed: Packed) -> str | None:
        """See `Carrier.place`."""
        array = packed.array.get(VECTOR)
        if not isinstance(array, _Numbers) or isinstance(array.held, np.ndarray):
            return None
        return str(array.held.hex())

    def get(self, packed: Packed, most_bytes: float = math.inf) -> Tensor:
        """See `Carrier.get`."""
        array = packed.array.get(VECTOR)
        if not isinstance(array, _Numbers):
            return super().get(packed, most_bytes)
        if (found := 4 * array.shape[0]) > most_bytes:
            raise too_large(most_bytes, found)
        if isinstance(array.held, np.ndarray):
            return torch.from_numpy(array.held)
        import ray

        return copied(ray.get(array.held))
