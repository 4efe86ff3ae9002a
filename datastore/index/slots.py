"""Which id stands in which slot of FAISS's arrays."""

import numpy as np
from numpy.typing import NDArray

from datastore.errors import ExamplesMissingError
from datastore.index.base import NOTHING, Ids

Slots = NDArray[np.intp]


class SlotTable:
    """Ids by slot, and slots by id; 16 bytes an id.

    Parameters
    ----------
    ids
        Of the slots from 0 on, int64 of shape (n,); `NOTHING` in an empty slot.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids = np.array(ids, dtype=np.int64)
        self._order = np.argsort(self._ids, kind="stable")

    def __len__(self) -> int:
        """Return the number of slots, with the empty ones."""
        return len(self._ids)

    @property
    def by_slot(self) -> Ids:
        """The id in each slot, `NOTHING` where it is empty; shape (n,)."""
        return self._ids

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._ids.nbytes + self._order.nbytes

    def ids_at(self, slots: Ids) -> Ids:
        """Return the ids in ``slots``, of any shape; `NOTHING` where a slot is -1."""
        found = self._ids[slots]
        if slots.min(initial=0) < 0:
            found[slots < 0] = NOTHING
        return found

    def slots_of(self, ids: Ids) -> Slots:
        """Return the slots of ``ids`` (m,).

        Raises
        ------
        ExamplesMissingError
            If one of them is not there.
        """
        places = np.searchsorted(self._ids, ids, sorter=self._order)
        slots = self._order.take(places, mode="clip") if len(self) else places
        if len(slots) and (len(self) == 0 or (self._ids[slots] != ids).any()):
            raise ExamplesMissingError("the index does not hold all of these ids")
        return slots

    def append(self, ids: Ids) -> None:
        """Put ``ids`` (m,), none of which is there, into new slots at the end."""
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(self._ids, ids[order], sorter=self._order)
        self._order = np.insert(self._order, places, order + len(self))
        self._ids = np.concatenate([self._ids, ids])

    def vacate(self, ids: Ids) -> None:
        """Leave the slots of ``ids`` empty; no other id moves."""
        self._ids[self.slots_of(ids)] = NOTHING
        is_empty = self._ids[self._order] == NOTHING
        parts = [self._order[is_empty], self._order[~is_empty]]
        self._order = np.concatenate(parts)

    def close_up(self, ids: Ids) -> tuple[Slots, Slots]:
        """Take ``ids`` (m,) out and the last m slots away.

        Returns
        -------
        tuple
            Slots whose content has to move, and where to: the ids that stood in the
            last slots and remain go where ``ids`` stood.
        """
        num_left = len(self) - len(ids)
        stays = np.ones(len(self), dtype=bool)
        stays[self.slots_of(ids)] = False
        holes = np.flatnonzero(~stays[:num_left])
        movers = num_left + np.flatnonzero(stays[num_left:])
        moved_to = np.arange(len(self))
        moved_to[movers] = holes
        self._order = moved_to[self._order[stays[self._order]]]
        self._ids[holes] = self._ids[movers]
        self._ids = self._ids[:num_left].copy()
        return movers, holes
