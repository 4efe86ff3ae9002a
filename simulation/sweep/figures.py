"""The figures of a sweep's runs, and what the seeds say of each point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.intervals import Estimate, estimate
from simulation.reporting.runs import EVERYBODY, load_run
from simulation.reporting.runs import GROUPS as OF_RESULTS
from simulation.sweep.points import Values
from simulation.sweep.running import Outcome
from simulation.sweep.settings import FIGURES, GLOBAL, SweepSettings

GROUPS = (*OF_RESULTS, EVERYBODY)
COLUMNS = tuple(
    f"{group}.{prefix}{figure}"
    for group in GROUPS
    for prefix in ("", GLOBAL)
    for figure in FIGURES
)
"""What there is of each run, as in ``unseen.global.accuracy_weighted``."""

Figures = Mapping[str, float | None]
"""By column; None where there is no such figure."""


@dataclass(frozen=True)
class PointFigures:
    """How a point did.

    Attributes
    ----------
    variant, title, values
        Of the point.
    estimates
        By column, over its seeds.
    num_runs, num_failed
        Seeds that have figures, and seeds with which training diverged.
    """

    variant: str
    title: str
    values: Values
    num_runs: int
    num_failed: int
    estimates: Mapping[str, Estimate] = field(repr=False)


def column_of(settings: SweepSettings) -> str:
    """Return the column that a sweep shows and chooses by."""
    return f"{settings.group}.{settings.y}"


def figures_of(run: Path) -> Figures:
    """Return the figures of a finished run by column, fractions of 1."""
    found = load_run(run)
    return {
        f"{group}.{prefix}{figure}": document.get(figure)
        for group in GROUPS
        for own in (found.figures(group),)
        for prefix, document in (("", own), (GLOBAL, own["global"]))
        for figure in FIGURES
    }


def estimated(outcomes: Sequence[Outcome]) -> list[PointFigures]:
    """Return the mean and the interval of every figure of each point."""
    return [_estimated(outcome) for outcome in outcomes]


def _estimated(outcome: Outcome) -> PointFigures:
    found = [figures_of(run) for run in outcome.runs.values()]
    return PointFigures(
        variant=outcome.point.variant,
        title=outcome.point.title,
        values=outcome.point.values,
        num_runs=len(outcome.runs),
        num_failed=len(outcome.failures),
        estimates={
            column: estimate(figures[column] for figures in found) for column in COLUMNS
        },
    )


def run_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return every run of a sweep with all its figures, as plain values."""
    return [
        {
            "variant": outcome.point.variant,
            **outcome.point.values,
            "seed": seed,
            "run": outcome.runs[seed].name if seed in outcome.runs else None,
            "failure": outcome.failures.get(seed),
            **(figures_of(outcome.runs[seed]) if seed in outcome.runs else {}),
        }
        for outcome in outcomes
        for seed in outcome.point.runs
    ]
