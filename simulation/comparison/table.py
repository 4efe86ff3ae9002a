"""The table of a comparison: means and standard deviations over the seeds."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knnper.config.errors import RunError
from server.run_folder import RunFolder
from simulation.comparison.comparing import Outcome
from simulation.intervals import Estimate, estimate

GROUPS = ("seen", "unseen")


@dataclass(frozen=True)
class GroupFigures:
    """How a row did on one group of clients, over the seeds; fractions of 1.

    Attributes
    ----------
    average, bottom_decile
        As in `server.results.Summary`: ``accuracy_weighted``,
        ``accuracy_bottom_decile``.
    fraction_hurt
        Share of the clients that are right less often than in the reference row's run
        of the same seed.
    """

    average: Estimate
    bottom_decile: Estimate
    fraction_hurt: Estimate


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Attributes
    ----------
    name, title
        Of the row.
    seen, unseen
        Its figures.
    chosen
        What was chosen on validation data, by key.
    validation
        The accuracy that it was chosen for.
    seconds
        Of one tested run, mean over the seeds; None if all failed.
    num_failed
        Seeds with which the run failed: they are in no figure.
    """

    name: str
    title: str
    seen: GroupFigures
    unseen: GroupFigures
    chosen: Mapping[str, Any]
    validation: float | None
    seconds: float | None
    num_failed: int


@dataclass(frozen=True)
class _Client:
    """A client of a run, and the accuracy of its model if it has test examples."""

    name: str
    seen: bool
    accuracy: float | None


def table_of(outcomes: Sequence[Outcome], reference: str) -> list[TableRow]:
    """Return a row for each outcome, in their order.

    Parameters
    ----------
    outcomes
        Tuned and tested rows.
    reference
        The name of the one that hurt clients are counted against.

    Raises
    ------
    RunError
        If the file of a run's clients is missing or damaged.
    """
    (runs,) = [one.runs for one in outcomes if one.row.name == reference]
    base = {seed: _accuracies(path) for seed, path in runs.items()}
    return [_row(outcome, base) for outcome in outcomes]


def _row(outcome: Outcome, base: Mapping[int, Mapping[str, float | None]]) -> TableRow:
    results = {seed: RunFolder(path).results() for seed, path in outcome.runs.items()}
    hurt = {
        seed: _hurt(_clients(path), base[seed]) for seed, path in outcome.runs.items()
    }

    def group(name: str) -> GroupFigures:
        documents = [one[name] for one in results.values()]
        return GroupFigures(
            estimate(one["accuracy_weighted"] for one in documents),
            estimate(one["accuracy_bottom_decile"] for one in documents),
            estimate(one[name] for one in hurt.values()),
        )

    scores = {id(one.candidate): one.score for one in outcome.tried}
    return TableRow(
        name=outcome.row.name,
        title=outcome.row.title,
        seen=group("seen"),
        unseen=group("unseen"),
        chosen=outcome.chosen.values,
        validation=scores.get(id(outcome.chosen)),
        seconds=estimate(map(_seconds, results.values())).mean,
        num_failed=len(outcome.failures),
    )


def _seconds(results: Mapping[str, Any]) -> float:
    training = results["training"]
    return float(training["seconds"] + training["personalization_seconds"])


def _clients(path: Path) -> list[_Client]:
    """Return the clients of a finished run.

    Raises
    ------
    RunError
        If their file is missing or damaged.
    """
    file = path / "clients.csv"
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return [_client(row) for row in csv.DictReader(lines)]
    except (OSError, KeyError, ValueError) as error:
        raise RunError(
            f"{file} is missing or damaged, expected the clients of a finished run: "
            f"{error}. Delete {path}, and the same command makes the run anew"
        ) from error


def _client(row: Mapping[str, str]) -> _Client:
    return _Client(row["client"], row["seen"] == "true", _number(row["accuracy"]))


def _accuracies(path: Path) -> dict[str, float | None]:
    return {client.name: client.accuracy for client in _clients(path)}


def _number(text: str) -> float | None:
    return float(text) if text else None


def _hurt(
    clients: Iterable[_Client], base: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return the share of the clients of each group that do worse than in ``base``."""
    worse: dict[str, list[bool]] = {group: [] for group in GROUPS}
    for client in clients:
        ours, theirs = client.accuracy, base[client.name]
        if ours is not None and theirs is not None:
            worse["seen" if client.seen else "unseen"].append(ours < theirs)
    return {group: estimate(map(float, found)).mean for group, found in worse.items()}


HEADER = (
    "method",
    "seen",
    "bottom decile",
    "hurt",
    "unseen",
    "bottom decile",
    "hurt",
    "s a run",
)


def spread_remark(rows: Sequence[TableRow], num_seeds: int) -> str | None:
    """Return what stands after ± in the table; None where it stands nowhere."""
    figures = [row.seen.average for row in rows] + [row.unseen.average for row in rows]
    if all(figure.std is None for figure in figures):
        return None
    return (
        f"In the comparison's table ± is the standard deviation over {num_seeds} "
        "seeds; table.csv has half of the 95 % intervals too"
    )


def as_cells(rows: Sequence[TableRow]) -> list[list[str]]:
    """Return a header and the rows as text, in percent."""
    return [list(HEADER), *(_cells(row) for row in rows)]


def _cells(row: TableRow) -> list[str]:
    figures = [
        figure
        for group in (row.seen, row.unseen)
        for figure in (group.average, group.bottom_decile, group.fraction_hurt)
    ]
    seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
    failed = f" ({row.num_failed} failed)" if row.num_failed else ""
    return [row.title + failed, *map(_percent, figures), seconds]


def _percent(figure: Estimate) -> str:
    if figure.mean is None:
        return "-"
    mean = f"{100 * figure.mean:.1f}"
    return mean if figure.std is None else f"{mean} ± {100 * figure.std:.1f}"


def as_csv(rows: Sequence[TableRow]) -> str:
    """Return every figure, a column each, fractions of 1; empty where there is none.

    A column ``NAME_std`` has the standard deviation over the seeds, and one
    ``NAME_half_width`` half of the 95 % interval.
    """
    text = io.StringIO()
    documents = [_flat(row) for row in rows]
    writer = csv.DictWriter(text, list(documents[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(documents)
    return text.getvalue()


def _flat(row: TableRow) -> dict[str, Any]:
    flat: dict[str, Any] = {"row": row.name, "method": row.title}
    for group in GROUPS:
        for name, figure in asdict(getattr(row, group)).items():
            flat[f"{group}_{name}"] = figure["mean"]
            flat[f"{group}_{name}_std"] = figure["std"]
            flat[f"{group}_{name}_half_width"] = figure["half_width"]
    flat["validation"] = row.validation
    flat["chosen"] = json.dumps(dict(row.chosen))
    flat["seconds"] = row.seconds
    flat["num_failed"] = row.num_failed
    return flat
