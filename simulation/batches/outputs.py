"""The files of a batch beside its runs: tables, a plot, and the choice of the best."""

import itertools
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from knnper.files import write_atomically
from knnper.simulation.batches.choice import CHOSEN, best_points, chosen_sweep
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.family import FAILED
from knnper.simulation.batches.figure_names import label_of
from knnper.simulation.batches.runner import Outcome, Plan, failure_remark, folder_of
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.batches.tables import (
    PointRow,
    compared_run_rows,
    csv_of,
    run_rows,
    table_of,
)
from knnper.simulation.origin import older_code
from knnper.simulation.reports.estimate import WEAK_NOTE
from knnper.simulation.reports.finished_run import GROUPS
from knnper.simulation.reports.table import Chart, Shown, csv_text
from knnper.simulation.reports.text import term_of

TABLE = "table.md"
PLOT = "plot"
_LEAST_SEEDS = 3  # for an interval


def write_batch(
    plan: Plan, outcomes: Sequence[Outcome], rows: Sequence[PointRow], folder: Path
) -> Shown:
    """Write the files of a batch; return its tables, charts and remarks."""
    # Files that an earlier version of the sweep wrote and this one may not.
    for name in (CHOSEN, *(f"{PLOT}.{ending}" for ending in ("svg", "pdf", "png"))):
        (folder / name).unlink(missing_ok=True)
    table = table_of(plan, rows)
    interval_notes = list(_interval_notes(plan, rows))
    notes = "".join(f"\n{note}\n" for note in interval_notes)
    write_atomically(folder / TABLE, table.as_markdown() + notes)
    write_atomically(folder / "table.csv", csv_of(plan, outcomes, rows))
    if isinstance(plan, Sweep):
        points = run_rows(outcomes)
    else:
        points = compared_run_rows(plan, outcomes, rows)
    write_atomically(folder / "points.csv", csv_text(points))
    charts = _write_plot(plan, rows, folder)
    choice_remarks = _write_choice(plan, rows, folder)
    tuning = [
        candidate.point.tuning
        for outcome in outcomes
        for candidate in outcome.candidates
    ]
    runs = {
        *(folder_of(run, folder) for run in tuning if run is not None),
        *(run for outcome in outcomes for run in outcome.runs.values()),
    }
    remarks = (
        *interval_notes,
        *_failure_remarks(plan, outcomes, folder),
        *older_code(runs, folder),
        *choice_remarks,
    )
    return Shown((table,), charts, remarks)


def _interval_notes(plan: Plan, rows: Sequence[PointRow]) -> Iterator[str]:
    """Yield notes on weak intervals, and in a comparison on the meaning of ±."""
    columns = [f"{group}.accuracy_weighted" for group in GROUPS]
    estimates = [row.estimates[column] for row in rows for column in columns]
    # A mark stands for an interval of few runs.
    if any(estimate.mark for row in rows for estimate in row.estimates.values()):
        yield WEAK_NOTE
    has_intervals = any(estimate.std is not None for estimate in estimates)
    if isinstance(plan, Comparison) and has_intervals:
        yield (
            f"In the comparison's table ± is half of the 95 % interval over "
            f"{len(plan.seeds)} seeds; table.csv has the standard deviations too"
        )


def _failure_remarks(
    plan: Plan, outcomes: Sequence[Outcome], folder: Path
) -> Iterator[str]:
    """Yield remarks on runs that failed, with how to repeat them."""
    candidates = [candidate for outcome in outcomes for candidate in outcome.candidates]
    num_failed = sum(candidate.failure is not None for candidate in candidates)
    if num_failed:
        yield (
            f"{num_failed} of {len(candidates)} candidates failed on validation data "
            f"and were not chosen; {FAILED} in the folder of each run has the reason. "
            "To make a run again, delete its folder"
        )
    for outcome in outcomes:
        point = outcome.point
        name = point.title
        if isinstance(plan, Sweep):
            name = f"{point.variant} {dict(point.values)}"
        for seed, reason in outcome.failures.items():
            run = folder_of(point.runs[seed], folder)
            yield failure_remark(name, seed, reason, run)


def _write_plot(
    plan: Plan, rows: Sequence[PointRow], folder: Path
) -> tuple[Chart, ...]:
    if not isinstance(plan, Sweep) or plan.settings.x is None:
        return ()
    # Imported here, since both need matplotlib, which only plots need.
    from knnper.simulation.batches.plot import plot_of
    from knnper.simulation.reports.figure import write_pictures

    settings = plan.settings
    figure = plot_of(rows, settings)
    if figure is None:
        return ()
    write_pictures(folder, PLOT, figure)
    label = label_of(settings.y)
    term = term_of(settings.x or "")
    title = (
        f"{label[0].upper()}{label[1:]} of {settings.group} clients by {term}; "
        "bars are 95 % intervals over the seeds"
    )
    return (Chart(PLOT, title, figure),)


def _write_choice(plan: Plan, rows: Sequence[PointRow], folder: Path) -> list[str]:
    """Write the sweep that tests the best points; return remarks on the choice."""
    if not isinstance(plan, Sweep) or plan.settings.evaluate_on != "validation":
        return []
    best = best_points(plan, rows)
    path = folder / CHOSEN
    write_atomically(path, chosen_sweep(plan, best))
    remarks = []
    for point in best:
        variant = f" of {point.variant}" if plan.settings.variants else ""
        values = dict(point.values)
        remarks.append(f"best{variant} on validation data: {values}")
    # Seeds that nothing was chosen with.
    unused = (seed for seed in itertools.count() if seed not in plan.seeds)
    seeds = list(itertools.islice(unused, max(_LEAST_SEEDS, len(plan.seeds))))
    remarks.append(
        f"To test it, once: knnper sweep {shlex.quote(str(path))} --set 'seeds={seeds}'"
    )
    return remarks
