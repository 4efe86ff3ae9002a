"""The clients of finished runs, read from ``clients.csv`` as tables."""

import csv
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from knnper.errors import RunError
from knnper.metrics import ACCURACY
from knnper.server.result_files import columns_of
from knnper.server.results import fraction_degraded
from knnper.settings import LARGEST_COUNT
from knnper.simulation.reports.setups import Setup

FILE = "clients.csv"
MOST_CLIENTS = 10_000  # drawn in a chart
_REQUIRED = ("client", "seen", "num_test", ACCURACY)
_LARGEST_NUMBER = 1e100  # beyond it, sums and charts may overflow
_COUNTS = ("num_test", "num_stored", "num_rounds")
# The last three belong to runs with virtual time, and to clients that trained.
_OPTIONAL = ("knn_weight", "num_stored", "num_rounds", "round_seconds", "staleness")


def read_clients(run: Path, metric: str = ACCURACY) -> pd.DataFrame:
    """Read the clients of a finished run that have test examples.

    Returns
    -------
    A row a client, with the columns ``client`` (str), ``seen`` (bool), ``num_test``
    (int), ``accuracy`` and ``accuracy_global`` (float) and, NaN where unknown,
    ``knn_weight``, ``num_stored``, ``num_rounds``, ``round_seconds`` and ``staleness``.
    With another ``metric`` the two accuracies are that metric's values, and clients for
    which it is undefined are left out.

    Raises
    ------
    RunError
        If the file is missing or damaged.
    """
    path = run / FILE
    try:
        return _parse(_read_cells(path), metric)
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(
            f"{path} is missing or damaged, expected the columns of a run: {error}"
        ) from error


def _read_cells(path: Path) -> pd.DataFrame:
    """Read the cells as text; every line must have as many as the header."""
    # The csv module, since pandas pads short lines without an error.
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file) or [[]]
    if missing := set(_REQUIRED).difference(header):
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"{line[:1]} has {len(line)} cells, not {len(header)}")
    return pd.DataFrame(lines, columns=header, dtype="object")


def _parse(cells: pd.DataFrame, metric: str) -> pd.DataFrame:
    personal, reference = columns_of(metric)
    sources = {
        "num_test": "num_test",
        "accuracy": personal,
        "accuracy_global": reference,
        **{name: name for name in _OPTIONAL},
    }
    text = cells.reindex(
        columns=[*_REQUIRED, personal, reference, *_OPTIONAL], fill_value=""
    )
    text = text.loc[:, ~text.columns.duplicated()]
    text = text[(text[[ACCURACY, personal, reference]] != "").all(axis=1)]
    clients = pd.DataFrame({"client": text["client"].astype(str)})
    if not text["seen"].isin(["true", "false"]).all():
        raise ValueError("the column seen has other values than true and false")
    clients["seen"] = text["seen"] == "true"
    for name, source in sources.items():
        numbers = text[source].map(lambda cell: float(cell) if cell else None)
        clients[name] = numbers.astype(float)
        known = clients[name][text[source] != ""]
        if not (known.abs() <= _LARGEST_NUMBER).all():  # also false for NaN
            raise ValueError(f"the column {source} has a value that is no number")
        if (
            name in _COUNTS
            and not (known.between(0, LARGEST_COUNT) & (known % 1 == 0)).all()
        ):
            raise ValueError(f"the column {source} has a value that is no count")
    return clients.astype({"num_test": int}).reset_index(drop=True)


def clients_of_setup(setup: Setup) -> pd.DataFrame:
    """Read the clients of all seeds, as `read_clients`, with their ``seed``.

    Runs without ``clients.csv`` are left out; without any, the table has no rows.
    """
    tables = [
        read_clients(run.path).assign(seed=run.seed)
        for run in setup.runs
        if has_clients(run.path)
    ]
    if not tables:
        columns = (*_REQUIRED, "accuracy_global", *_OPTIONAL, "seed")
        return pd.DataFrame(columns=list(columns)).astype({"seen": bool})
    return pd.concat(tables, ignore_index=True)


def has_clients(run: Path) -> bool:
    """Return whether a run's folder has the file of its clients."""
    return (run / FILE).is_file()


def sample_names(names: Iterable[str]) -> list[int]:
    """Return the positions of at most `MOST_CLIENTS` names, in their order.

    Those with the smallest SHA-256: an arbitrary choice, and the same in every run.
    """
    hashes = [hashlib.sha256(name.encode()).digest() for name in names]
    chosen = sorted(range(len(hashes)), key=hashes.__getitem__)[:MOST_CLIENTS]
    return sorted(chosen)


def note_on_sample(counts: Iterable[tuple[str, int, int]]) -> str:
    """Describe what a chart leaves out, of (noun, number drawn, number of all)."""
    cut = [
        f"{drawn:,} of the {total:,} {noun}"
        for noun, drawn, total in counts
        if drawn < total
    ]
    sample = "a sample by the SHA-256 of their names"
    return f"Drawn are {'; '.join(cut)}: {sample}." if cut else ""


def fraction_degraded_against(
    clients: pd.DataFrame, reference: Mapping[str, float], metric: str = ACCURACY
) -> float | None:
    """Return the fraction of clients with a worse metric than the reference.

    ``reference``: The metric with another model by client name; other clients are left
    out.
    """
    names, values = clients["client"], clients["accuracy"]
    pairs = (
        (value, reference.get(name)) for name, value in zip(names, values, strict=True)
    )
    return fraction_degraded(pairs, metric)
