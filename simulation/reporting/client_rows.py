"""What ``clients.csv`` says of each client."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass

from knnper.config.errors import RunError
from simulation.reporting.runs import Run
from simulation.reporting.setups import Setup


@dataclass(frozen=True)
class ClientRow:
    """A client of a run that has test examples.

    Attributes
    ----------
    seen
        Whether it could take part in training.
    num_test
        Examples it was tested on, one at least.
    accuracy, accuracy_global
        Of its personalised model, and of the unpersonalised one.
    knn_weight, num_stored
        λ, and the examples in its memory; None for methods without one.
    """

    seen: bool
    num_test: int
    accuracy: float
    accuracy_global: float
    knn_weight: float | None
    num_stored: int | None


def client_rows(setup: Setup) -> list[ClientRow]:
    """Return the clients of all seeds that have test examples.

    Raises
    ------
    RunError
        If a file is damaged.
    """
    return [row for run in setup.runs for row in _rows_of(run)]


def _rows_of(run: Run) -> list[ClientRow]:
    path = run.path / "clients.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return [_parse(row) for row in csv.DictReader(file) if row["accuracy"]]
        except (KeyError, ValueError) as error:
            raise RunError(
                f"{path} is damaged, expected the columns of a run: {error}"
            ) from error


def _parse(row: Mapping[str, str]) -> ClientRow:
    weight, stored = row.get("knn_weight"), row.get("num_stored")
    return ClientRow(
        seen=row["seen"] == "true",
        num_test=int(row["num_test"]),
        accuracy=float(row["accuracy"]),
        accuracy_global=float(row["accuracy_global"]),
        knn_weight=float(weight) if weight else None,
        num_stored=int(float(stored)) if stored else None,
    )
