"""The one row that says what a store is: sealed anew by each change of the store."""

import dataclasses
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from datastore.policy.base import StreamState
from datastore.sqlite.checksums import row_checksum
from datastore.sqlite.connection import damaged


@dataclass
class StoreRow:
    """The columns of the table ``store``, all of which its checksum covers.

    Attributes
    ----------
    store_id
        Unlike any other store's.
    created
        Seconds since 1970 (UTC).
    spec, settings
        JSON of `StoreSpec` and `StoreSettings`.
    active, previous
        The numbers of what is searched, and of what can be rolled back to.
    num_removed
        Examples that ever left.
    stream
        JSON of what the policy remembers.
    erasing
        1 where deleted examples may still have left bytes.
    index_token
        Of the last save of the index.
    num_examples, digest
        N, and `checksums.digest` of them.
    num_changes
        Transactions that ever changed the store.
    """

    store_id: str
    created: float
    spec: str
    settings: str
    active: int
    stream: str
    previous: int | None = None
    num_removed: int = 0
    erasing: int = 0
    index_token: str = ""
    num_examples: int = 0
    digest: int = 0
    num_changes: int = 0

    @classmethod
    def read(cls, connection: sqlite3.Connection, path: Path) -> Self:
        """Return the row of the database in ``path``.

        Raises
        ------
        StoreDamagedError
            If it is not what was written.
        """
        rows = connection.execute(f"SELECT {_COLUMNS}, checksum FROM store").fetchall()
        if len(rows) != 1 or cls(*rows[0][:-1]).checksum != rows[0][-1]:
            raise damaged(
                path,
                "what it says of the store, such as its classes and its capacity, is "
                "not what was written",
            )
        return cls(*rows[0][:-1])

    def write(self, connection: sqlite3.Connection) -> None:
        """Replace the row."""
        connection.execute(_REPLACE, (*vars(self).values(), self.checksum))

    @property
    def checksum(self) -> int:
        """Of all other columns."""
        return row_checksum(*vars(self).values())

    @property
    def num_offered(self) -> int:
        """The largest id that was given."""
        return int(json.loads(self.stream)["num_offered"])

    @property
    def stream_state(self) -> StreamState:
        """What the policy remembers."""
        document = json.loads(self.stream)
        return StreamState(
            document["num_offered"],
            np.array(document["num_seen"], dtype=np.int64),
            np.array(document["was_largest"], dtype=np.bool_),
        )

    @stream_state.setter
    def stream_state(self, stream: StreamState) -> None:
        self.stream = encode_stream(stream)


_NAMES = [field.name for field in dataclasses.fields(StoreRow)]
_COLUMNS = ", ".join(_NAMES)
_REPLACE = (
    f"INSERT OR REPLACE INTO store (one, {_COLUMNS}, checksum) "
    f"VALUES (1, {', '.join('?' * (len(_NAMES) + 1))})"
)


def encode_stream(stream: StreamState) -> str:
    """Return what a policy remembers as JSON."""
    document = {
        "num_offered": stream.num_offered,
        "num_seen": stream.num_seen.tolist(),
        "was_largest": stream.was_largest.tolist(),
    }
    return json.dumps(document)
