"""``knnper sweep``: an experiment at many settings and several seeds."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_json, print_table, say
from knnper.cli.resumable import counting

if TYPE_CHECKING:
    from simulation.sweep.figures import PointFigures
    from simulation.sweep.plan import Sweep
    from simulation.sweep.running import Outcome

SweepFile = Annotated[
    Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep's file.")
]
Output = Annotated[
    Path | None,
    typer.Option(help="The folder of all its runs.", show_default="runs/NAME"),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Trainings side by side; one a CPU core.")
]


def sweep(
    sweep: SweepFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at many settings over several seeds; write tables and a plot.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # All below loads torch, which `knnper --help` need not wait for.
    from pydantic_core import to_jsonable_python

    from knnper.machine import usable_cores
    from simulation.sweep.figures import estimated
    from simulation.sweep.plan import read_sweep
    from simulation.sweep.running import num_steps, run_sweep

    plan = read_sweep(sweep, overrides or ())
    folder = output or Path("runs") / plan.settings.name
    with counting(num_steps(plan), "steps", folder) as advance:
        outcomes = run_sweep(plan, folder, workers or usable_cores(), advance)
    rows = estimated(outcomes)
    _warn(outcomes, folder)
    cells = _write(plan, outcomes, rows, folder)
    if as_json:
        print_json(to_jsonable_python(rows))
    else:
        print_table(cells[0], cells[1:])
        say(f"Tables, and a plot where x is given, are in {folder}")
    if plan.settings.evaluate_on == "validation":
        _choose(plan, rows, folder)


def _warn(outcomes: "Sequence[Outcome]", folder: Path) -> None:
    from simulation.batch.code import num_made_otherwise

    for outcome in outcomes:
        for seed, reason in outcome.failures.items():
            where = dict(outcome.point.values)
            say(f"{outcome.point.variant} {where} failed with seed {seed}: {reason}")
    runs = {run for outcome in outcomes for run in outcome.runs.values()}
    if older := num_made_otherwise(runs):
        say(
            f"{older} of the runs in {folder} were made by another version of this "
            "code; to have all from this one, delete the folder and start again"
        )


def _write(
    plan: "Sweep",
    outcomes: "Sequence[Outcome]",
    rows: "Sequence[PointFigures]",
    folder: Path,
) -> list[list[str]]:
    """Write the tables and the plot; return the table for people."""
    from knnper.durable_files import write_atomically
    from simulation.figures.folder import FigureFolder
    from simulation.sweep.figures import run_rows
    from simulation.sweep.plot import plot_of
    from simulation.sweep.table import as_cells, as_csv, as_markdown, csv_text

    cells = as_cells(rows, plan.settings)
    write_atomically(folder / "points.csv", csv_text(run_rows(outcomes)))
    write_atomically(folder / "table.csv", as_csv(rows, plan.settings))
    write_atomically(folder / "table.md", as_markdown(cells))
    figure = plot_of(rows, plan.settings)
    if figure is not None:
        FigureFolder(folder).write_pictures("plot", figure)
    return cells


def _choose(plan: "Sweep", rows: "Sequence[PointFigures]", folder: Path) -> None:
    from knnper.durable_files import write_atomically
    from simulation.sweep.choosing import best_points, chosen_sweep

    best = best_points(plan, rows)
    for one in best:
        of_variant = f" of {one.variant}" if plan.settings.variants else ""
        say(f"best{of_variant} on validation data: {dict(one.values)}")
    path = folder / "chosen.yaml"
    write_atomically(path, chosen_sweep(plan, best))
    say(f"To test it, once: knnper sweep {shlex.quote(str(path))}")
