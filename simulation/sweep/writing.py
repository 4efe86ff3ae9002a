"""The files of a sweep that is done, and what there is to show of it."""

import itertools
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from knnper.durable_files import write_atomically
from simulation.batch.code import older_code
from simulation.batch.families import failure_remark, folder_of
from simulation.batch.folder import TABLE
from simulation.figures.folder import FigureFolder
from simulation.showing import Chart, Shown, Table
from simulation.sweep.choosing import best_points, chosen_sweep
from simulation.sweep.figures import PointFigures, run_rows
from simulation.sweep.plan import Sweep
from simulation.sweep.plot import plot_of
from simulation.sweep.running import Outcome
from simulation.sweep.settings import SweepSettings
from simulation.sweep.table import as_cells, as_csv, csv_text, label_of
from simulation.sweep.terms import term_of

_LEAST_SEEDS = 3
"""From which an interval can be told."""

PLOT = "plot"
CHOSEN = "chosen.yaml"


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
    _forget(folder)
    table = Table.of_cells(settings.name, as_cells(rows, settings))
    write_atomically(folder / "points.csv", csv_text(run_rows(outcomes)))
    write_atomically(folder / "table.csv", as_csv(rows, settings))
    write_atomically(folder / TABLE, table.as_markdown())
    figure = plot_of(rows, settings)
    if figure is not None:
        FigureFolder(folder).write_pictures(PLOT, figure)
    chosen = _choose(sweep, rows, folder) if _chooses(settings) else ()
    return Shown(
        (table,),
        () if figure is None else (Chart(PLOT, _title(settings), lambda: figure),),
        (*_failures(outcomes, folder), *_older(outcomes, folder), *chosen),
    )


def _forget(folder: Path) -> None:
    """Remove what an earlier state of the sweep left and this one may not write."""
    for name in (CHOSEN, *(f"{PLOT}.{ending}" for ending in ("svg", "pdf", "png"))):
        (folder / name).unlink(missing_ok=True)


def _chooses(settings: SweepSettings) -> bool:
    return settings.evaluate_on == "validation"


def _title(settings: SweepSettings) -> str:
    figure, key = label_of(settings.y), term_of(settings.x or "")
    return (
        f"{figure[0].upper()}{figure[1:]} of {settings.group} clients by {key}; "
        "bars are 95 % intervals over the seeds"
    )


def _failures(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    for outcome in outcomes:
        point = outcome.point
        for seed, reason in outcome.failures.items():
            what = f"{point.variant} {dict(point.values)}"
            run = folder_of(point.runs[seed], folder)
            yield failure_remark(what, seed, reason, run)


def _older(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    runs = {run for outcome in outcomes for run in outcome.runs.values()}
    yield from older_code(runs, folder)


def _choose(sweep: Sweep, rows: Sequence[PointFigures], folder: Path) -> list[str]:
    """Write the sweep that tests the best points; return what they are."""
    best = best_points(sweep, rows)
    path = folder / CHOSEN
    write_atomically(path, chosen_sweep(sweep, best))
    of_what = [f" of {one.variant}" if sweep.settings.variants else "" for one in best]
    return [
        *(
            f"best{of_variant} on validation data: {dict(one.values)}"
            for of_variant, one in zip(of_what, best, strict=True)
        ),
        f"To test it, once: knnper sweep {shlex.quote(str(path))} --set "
        f"'seeds={_other_seeds(sweep.settings.seeds)}'",
    ]


def _other_seeds(seeds: Sequence[int]) -> list[int]:
    """Return seeds that nothing was chosen with."""
    unused = (seed for seed in itertools.count() if seed not in seeds)
    return list(itertools.islice(unused, max(_LEAST_SEEDS, len(seeds))))
