"""The owner's names of stored examples, asked of the database once each."""

import numpy as np

from datastore.contents import Ids
from datastore.store_reader import StoreReader

MOST = 100_000
"""Names that are kept: some megabytes."""


class Names:
    """Names by id, which stands for the same example for ever.

    Parameters
    ----------
    store
        Knows them.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._known: dict[int, str | None] = {}

    def of(self, ids: Ids) -> list[list[str | None]]:
        """Return the names of ids (n, k); None where there is none, or no longer."""
        if len(self._known) > MOST:
            self.forget()
        # Another thread may forget meanwhile, which leaves this dictionary alone.
        rows, known = ids.tolist(), self._known
        missing = sorted({one for row in rows for one in row} - known.keys())
        if missing:
            found = self._store.external_ids(np.array(missing, np.int64))
            known.update(zip(missing, found, strict=True))
        return [[known[one] for one in row] for row in rows]

    def forget(self) -> None:
        """Keep no name of what was deleted."""
        self._known = {}
