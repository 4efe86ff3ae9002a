"""What ``clients.csv`` says of each client."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import RunError
from server.results import fraction_degraded
from simulation.reporting.setups import Setup

_CLIENTS = "clients.csv"


@dataclass(frozen=True)
class ClientRow:
    """A client of a run that has test examples.

    Attributes
    ----------
    client
        Its name.
    seen
        Whether it could take part in training.
    num_test
        Examples it was tested on, one at least.
    accuracy, accuracy_global
        Of its personalised model, and of the unpersonalised one.
    knn_weight, num_stored
        λ, and the examples in its memory; None for methods without one.
    """

    client: str
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
    return [
        row
        for run in setup.runs
        if has_clients(run.path)
        for row in clients_of(run.path)
    ]


def has_clients(run: Path) -> bool:
    """Return whether a run's folder has the file of its clients."""
    return (run / _CLIENTS).is_file()


def clients_of(run: Path) -> list[ClientRow]:
    """Return the clients of a finished run that have test examples.

    Raises
    ------
    RunError
        If their file is missing or damaged.
    """
    path = run / _CLIENTS
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_parse(row) for row in csv.DictReader(file) if row["accuracy"]]
    except (OSError, KeyError, ValueError) as error:
        raise RunError(
            f"{path} is missing or damaged, expected the columns of a run: {error}"
        ) from error


def fraction_degraded_against(
    clients: Iterable[ClientRow], accuracies: Mapping[str, float]
) -> float | None:
    """Return `fraction_degraded` against another model's accuracies by client."""
    return fraction_degraded(
        (one.accuracy, accuracies.get(one.client)) for one in clients
    )


def _parse(row: Mapping[str, str]) -> ClientRow:
    weight, stored = row.get("knn_weight"), row.get("num_stored")
    return ClientRow(
        client=row["client"],
        seen=row["seen"] == "true",
        num_test=int(row["num_test"]),
        accuracy=float(row["accuracy"]),
        accuracy_global=float(row["accuracy_global"]),
        knn_weight=float(weight) if weight else None,
        num_stored=int(float(stored)) if stored else None,
    )
