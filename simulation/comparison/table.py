"""The table of a comparison: means and standard deviations over the seeds."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knnper.config.errors import RunError
from server.run_folder import RunFolder
from simulation.comparison.comparing import Outcome
from simulation.intervals import Estimate, estimate
from simulation.reporting.client_rows import (
    ClientRow,
    clients_of,
    fraction_degraded_against,
)
from simulation.showing import degraded_vs

GROUPS = ("seen", "unseen")


@dataclass(frozen=True)
class GroupFigures:
    """How a row did on one group of clients, over the seeds; fractions of 1.

    Attributes
    ----------
    average, bottom_decile
        As in `server.results.Summary`: ``accuracy_weighted``,
        ``accuracy_bottom_decile``.
    fraction_degraded
        `server.results.fraction_degraded` against the reference row's run of the same
        seed.
    """

    average: Estimate
    bottom_decile: Estimate
    fraction_degraded: Estimate


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


def table_of(outcomes: Sequence[Outcome], reference: str) -> list[TableRow]:
    """Return a row for each outcome, in their order.

    Parameters
    ----------
    outcomes
        Tuned and tested rows.
    reference
        The name of the one that clients are compared with.

    Raises
    ------
    RunError
        If the file of a run's clients is missing or damaged.
    """
    (runs,) = [one.runs for one in outcomes if one.row.name == reference]
    base = {
        seed: {one.client: one.accuracy for one in _clients(path)}
        for seed, path in runs.items()
    }
    return [_row(outcome, base) for outcome in outcomes]


def _row(outcome: Outcome, base: Mapping[int, Mapping[str, float]]) -> TableRow:
    results = {seed: RunFolder(path).results() for seed, path in outcome.runs.items()}
    clients = {seed: _clients(path) for seed, path in outcome.runs.items()}

    def degraded(seed: int, *, seen: bool) -> float | None:
        of_group = (one for one in clients[seed] if one.seen == seen)
        return fraction_degraded_against(of_group, base[seed])

    def group(name: str) -> GroupFigures:
        documents = [one[name] for one in results.values()]
        return GroupFigures(
            estimate(one["accuracy_weighted"] for one in documents),
            estimate(one["accuracy_bottom_decile"] for one in documents),
            estimate(degraded(seed, seen=name == "seen") for seed in clients),
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


def _clients(path: Path) -> list[ClientRow]:
    try:
        return clients_of(path)
    except RunError as error:
        raise RunError(
            f"{error}. Delete {path}, and the same command makes the run anew"
        ) from error


def spread_remark(rows: Sequence[TableRow], num_seeds: int) -> str | None:
    """Return what stands after ± in the table; None where it stands nowhere."""
    figures = [row.seen.average for row in rows] + [row.unseen.average for row in rows]
    if all(figure.std is None for figure in figures):
        return None
    return (
        f"In the comparison's table ± is the standard deviation over {num_seeds} "
        "seeds; table.csv has half of the 95 % intervals too"
    )


def as_cells(rows: Sequence[TableRow], reference: str) -> list[list[str]]:
    """Return a header and the rows as text, in percent.

    Parameters
    ----------
    rows
        As `table_of` returns them.
    reference
        The name of the row that clients are compared with.
    """
    (title,) = [row.title for row in rows if row.name == reference]
    of_group = ("bottom decile", degraded_vs(title))
    header = ["method", "seen", *of_group, "unseen", *of_group, "s a run"]
    return [header, *(_cells(row) for row in rows)]


def _cells(row: TableRow) -> list[str]:
    figures = [
        figure
        for group in (row.seen, row.unseen)
        for figure in (group.average, group.bottom_decile, group.fraction_degraded)
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
