"""The files of a sweep that is done, and what there is to show of it."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from knnper.durable_files import write_atomically
from simulation.batch.code import older_code
from simulation.figures.folder import FigureFolder
from simulation.showing import Chart, Shown, Table
from simulation.sweep.choosing import best_points, chosen_sweep
from simulation.sweep.figures import PointFigures, run_rows
from simulation.sweep.plan import Sweep
from simulation.sweep.plot import plot_of
from simulation.sweep.running import Outcome
from simulation.sweep.settings import SweepSettings
from simulation.sweep.table import as_cells, as_csv, as_markdown, csv_text, label_of

PLOT = "plot"


def write_sweep(
    sweep: Sweep,
    outcomes: Sequence[Outcome],
    rows: Sequence[PointFigures],
    folder: Path,
) -> Shown:
    """Write tables and plot, and with validation data the sweep that tests the best.

    Parameters
    ----------
    sweep
        What was run.
    outcomes
        Its points.
    rows
        `simulation.sweep.figures.estimated` of them.
    folder
        Holds the runs.

    Raises
    ------
    RunError
        If a choice is asked for and a variant has no point to choose.
    """
    settings = sweep.settings
    cells = as_cells(rows, settings)
    write_atomically(folder / "points.csv", csv_text(run_rows(outcomes)))
    write_atomically(folder / "table.csv", as_csv(rows, settings))
    write_atomically(folder / "table.md", as_markdown(cells))
    figure = plot_of(rows, settings)
    if figure is not None:
        FigureFolder(folder).write_pictures(PLOT, figure)
    chosen = _choose(sweep, rows, folder) if _chooses(settings) else ()
    return Shown(
        (Table.of_cells(settings.name, cells),),
        () if figure is None else (Chart(PLOT, _title(settings), lambda: figure),),
        (*_failures(outcomes), *_older(outcomes, folder), *chosen),
    )


def _chooses(settings: SweepSettings) -> bool:
    return settings.evaluate_on == "validation"


def _title(settings: SweepSettings) -> str:
    figure = label_of(settings.y)
    return (
        f"{figure[0].upper()}{figure[1:]} of {settings.group} clients by {settings.x}; "
        "bars are 95 % intervals over the seeds"
    )


def _failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        for seed, reason in outcome.failures.items():
            where = dict(outcome.point.values)
            yield f"{outcome.point.variant} {where} failed with seed {seed}: {reason}"


def _older(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    runs = {run for outcome in outcomes for run in outcome.runs.values()}
    yield from older_code(runs, folder)


def _choose(sweep: Sweep, rows: Sequence[PointFigures], folder: Path) -> list[str]:
    """Write the sweep that tests the best points; return what they are."""
    best = best_points(sweep, rows)
    path = folder / "chosen.yaml"
    write_atomically(path, chosen_sweep(sweep, best))
    of_what = [f" of {one.variant}" if sweep.settings.variants else "" for one in best]
    return [
        *(
            f"best{of_variant} on validation data: {dict(one.values)}"
            for of_variant, one in zip(of_what, best, strict=True)
        ),
        f"To test it, once: knnper sweep {shlex.quote(str(path))}",
    ]
