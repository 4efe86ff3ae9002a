"""The charges of private answers in a store's database: one row for each example.

The table is added by the first private answer, so a store that never gave any has the
format of earlier versions. An example without a row has no charges. Row 0 counts the
answered queries; no example has this id.
"""

import sqlite3
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import Ids, StoreDamagedError, named
from knnper.datastore.tables import (
    CHARGES,
    CHARGES_COLUMNS,
    ids_json,
    insert_statement,
    row_checksum,
)

_NUM_ANSWERS = 0  # id of the row that counts the answers


@dataclass(frozen=True, eq=False)
class Charges:
    """What examples have spent of their budgets, and the number of answers given."""

    spent: NDArray[np.float64]  # ρ of each example, in the order of the given ids
    num_answers: int
    damaged: tuple[int, ...] = ()  # ids of rows with a wrong checksum; spent is inf


def has_charges(connection: sqlite3.Connection) -> bool:
    """Return whether the store has ever given a private answer."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (CHARGES,)).fetchone() is not None


def read_charges(connection: sqlite3.Connection, ids: Ids) -> Charges:
    """Read the charges of ``ids`` (m,), ascending; damaged rows are reported."""
    spent = np.zeros(len(ids))
    if not has_charges(connection):
        return Charges(spent, 0)
    num_answers = 0
    damaged = []
    rows = connection.execute(
        f"SELECT id, spent, checksum FROM {CHARGES} WHERE id = {_NUM_ANSWERS} "
        "OR id IN (SELECT value FROM json_each(?))",
        (ids_json(ids),),
    )
    for example, charge, checksum in rows:
        is_intact = row_checksum(example, charge) == checksum
        if not is_intact:
            damaged.append(example)
        elif example == _NUM_ANSWERS:
            num_answers = int(charge)
        if example != _NUM_ANSWERS:
            spent[ids.searchsorted(example)] = charge if is_intact else np.inf
    return Charges(spent, num_answers, tuple(damaged))


def require_intact(charges: Charges) -> None:
    """Reject damaged charges: an example could be charged beyond its budget."""
    if charges.damaged:
        raise StoreDamagedError(
            f"the charges for private answers of {named(charges.damaged)} are not what "
            "was written; restore the store's folder from a backup, or copy it, after "
            "which these examples do not vote: knnper store rewrite FOLDER --to "
            "NEW_FOLDER"
        )


def write_charges(connection: sqlite3.Connection, ids: Ids, charges: Charges) -> None:
    """Replace the charges of ``ids`` (m,) and the number of answers."""
    connection.execute(f"CREATE TABLE IF NOT EXISTS {CHARGES} {CHARGES_COLUMNS}")
    rows = [
        (_NUM_ANSWERS, float(charges.num_answers)),
        *zip(ids.tolist(), charges.spent.tolist(), strict=True),
    ]
    connection.executemany(
        insert_statement(CHARGES, "id, spent"),
        ((*row, row_checksum(*row)) for row in rows),
    )
