"""The clients of finished runs, from ``clients.csv``."""

import csv
import hashlib
import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from knnper.errors import RunError
from knnper.metrics import ACCURACY
from knnper.server.result_files import Count, Number
from knnper.server.results import columns_of, fraction_degraded
from knnper.simulation.label_counts import ClientCounts
from knnper.simulation.reports.setups import Setup

_CLIENTS = "clients.csv"
_NEEDED_COLUMNS = frozenset(("client", "seen", "num_test", ACCURACY))
MOST_CLIENTS = 10_000


@dataclass(frozen=True, slots=True)  # there may be a million
class ClientRow:
    """A client of a run that has test examples."""

    client: str
    seen: bool
    num_test: Count
    accuracy: Number  # or another metric, as it was asked for
    accuracy_global: Number
    knn_weight: Number | None = None
    num_stored: Count | None = None
    # With virtual time, of those that trained.
    num_rounds: Count | None = None
    round_seconds: Number | None = None
    staleness: Number | None = None


_CLIENT_ROW = TypeAdapter(ClientRow)


C = TypeVar("C", ClientRow, ClientCounts)


def client_rows(setup: Setup) -> Iterator[ClientRow]:
    """Yield the clients of all seeds that have test examples."""
    for run in setup.runs:
        if has_clients(run.path):
            yield from clients_of(run.path)


def has_clients(run: Path) -> bool:
    """Return whether a run's folder has the file of its clients."""
    return (run / _CLIENTS).is_file()


def clients_of(run: Path, metric: str = ACCURACY) -> Iterator[ClientRow]:
    """Yield the clients of a finished run that have test examples, and the metric."""
    path, names = run / _CLIENTS, columns_of(ACCURACY)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := _NEEDED_COLUMNS.difference(reader.fieldnames or ()):
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"{row['client']!r} has another number of cells")
                if not row[ACCURACY]:
                    continue
                values = [row.get(column, "") for column in columns_of(metric)]
                row.update(zip(names, values, strict=True))
                if all(values):
                    known = {key: one for key, one in row.items() if one}
                    yield _CLIENT_ROW.validate_python(known)
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise RunError(
            f"{path} is missing or damaged, expected the columns of a run: {error}"
        ) from error


def sampled(clients: Iterable[C]) -> list[C]:
    """Return at most `MOST_CLIENTS` of the clients, in their order.

    Those whose names have the smallest SHA-256: by nothing but chance, and of each run
    the same ones.
    """

    def rank(numbered: tuple[int, C]) -> bytes:
        return hashlib.sha256(numbered[1].client.encode()).digest()

    chosen = heapq.nsmallest(MOST_CLIENTS, enumerate(clients), key=rank)
    return [one for _, one in sorted(chosen, key=operator.itemgetter(0))]


def note_on_sample(counts: Iterable[tuple[str, int, int]]) -> str:
    """Return a sentence on what is cut, of (what, number drawn, number of all)."""
    cut = [
        f"{drawn:,} of the {total:,} {what}"
        for what, drawn, total in counts
        if drawn < total
    ]
    sample = "a sample by the SHA-256 of their names"
    return f"Drawn are {'; '.join(cut)}: {sample}." if cut else ""


def fraction_degraded_against(
    clients: Iterable[ClientRow], by_client: Mapping[str, float], metric: str = ACCURACY
) -> float | None:
    """Return `fraction_degraded` against another model's metric by client."""
    pairs = ((it.accuracy, by_client.get(it.client)) for it in clients)
    return fraction_degraded(pairs, metric)
