"""The charges of private answers in a store's database: one row for each example.

The table is added by the first private answer, so a store that never gave any has the
format of earlier versions. An example without a row has no charges. An example with a
damaged row never votes again: it could otherwise be charged beyond its budget.
"""

import sqlite3

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import Ids
from knnper.datastore.tables import (
    CHARGES,
    CHARGES_COLUMNS,
    ids_json,
    insert_statement,
    row_checksum,
)


def has_charges(connection: sqlite3.Connection) -> bool:
    """Return whether the store has ever given a private answer."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (CHARGES,)).fetchone() is not None


def read_charges(connection: sqlite3.Connection, ids: Ids) -> NDArray[np.float64]:
    """Read the ρ of ``ids`` (m,), ascending; NaN where a row has another checksum."""
    spent = np.zeros(len(ids))
    if not has_charges(connection):
        return spent
    rows = connection.execute(
        f"SELECT id, spent, checksum FROM {CHARGES} "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (ids_json(ids),),
    )
    for example, charge, checksum in rows:
        is_intact = row_checksum(example, charge) == checksum
        spent[ids.searchsorted(example)] = charge if is_intact else np.nan
    return spent


def write_charges(
    connection: sqlite3.Connection, ids: Ids, spent: NDArray[np.float64]
) -> None:
    """Replace the ρ of ``ids`` (m,)."""
    connection.execute(f"CREATE TABLE IF NOT EXISTS {CHARGES} {CHARGES_COLUMNS}")
    connection.executemany(
        insert_statement(CHARGES, "id, spent"),
        (
            (example, charge, row_checksum(example, charge))
            for example, charge in zip(ids.tolist(), spent.tolist(), strict=True)
        ),
    )
