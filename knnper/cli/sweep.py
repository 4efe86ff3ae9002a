"""``knnper sweep``: an experiment at many settings and several seeds."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_shown_or_json, say
from knnper.cli.resumable import counting
from knnper.cli.typed import typed_command

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
Trained = Annotated[
    list[Path] | None,
    typer.Option(
        "--trained",
        metavar="RUN",
        help="A finished run whose training is not made anew; may be repeated.",
        show_default=False,
    ),
]


def sweep(
    sweep: SweepFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    trained: Trained = None,
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
    from simulation.sweep.running import num_steps, run_sweep, runs_there
    from simulation.sweep.writing import write_sweep

    plan = read_sweep(sweep, overrides or ())
    folder = output or Path("runs") / plan.settings.name
    num_runs, num_there = runs_there(plan, folder)
    say(f"{num_runs} runs, {num_there} of them there")
    with counting(num_steps(plan), "steps", folder) as advance:
        outcomes = run_sweep(
            plan,
            folder,
            workers or usable_cores(),
            advance,
            typed_command(),
            trained or (),
        )
    rows = estimated(outcomes)
    shown = write_sweep(plan, outcomes, rows, folder)
    print_shown_or_json(shown, to_jsonable_python(rows), as_json=as_json)
    say(f"Tables, and a plot where x is given, are in {folder}")
