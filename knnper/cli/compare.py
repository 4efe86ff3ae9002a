"""``knnper compare``: methods side by side, tuned on validation data."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_shown_or_json, say
from knnper.cli.resumable import counting
from knnper.cli.typed import typed_command

ComparisonFile = Annotated[
    Path, typer.Argument(metavar="COMPARISON.yaml", help="The comparison's file.")
]
Output = Annotated[
    Path | None,
    typer.Option(help="The folder of all its runs.", show_default="runs/NAME"),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Runs side by side; one a CPU core.")
]


def compare(
    comparison: ComparisonFile,
    overrides: Overrides = None,
    output: Output = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Tune every method on validation data, then test them over several seeds.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # All below loads torch, which `knnper --help` need not wait for.
    from pydantic_core import to_jsonable_python

    from knnper.machine import usable_cores
    from simulation.comparison.comparing import compare as run_comparison
    from simulation.comparison.comparing import num_runs
    from simulation.comparison.plan import read_comparison
    from simulation.comparison.table import table_of
    from simulation.comparison.writing import write_comparison

    plan = read_comparison(comparison, overrides or ())
    folder = output or Path("runs") / plan.name
    num_workers = workers or usable_cores()
    with counting(num_runs(plan), "runs", folder) as advance:
        outcomes = run_comparison(plan, folder, num_workers, advance, typed_command())
    rows = table_of(outcomes, plan.reference)
    shown = write_comparison(plan, outcomes, rows, folder)
    print_shown_or_json(shown, to_jsonable_python(rows), as_json=as_json)
    say(f"The table, as Markdown and as CSV with what was chosen, is in {folder}")
