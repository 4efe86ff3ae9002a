"""``knnper compare``: methods side by side, tuned on validation data."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_json, print_table, say
from knnper.cli.resumable import counting

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

    from knnper.durable_files import write_atomically
    from knnper.machine import usable_cores
    from simulation.batch.code import num_made_otherwise
    from simulation.comparison.comparing import compare as run_comparison
    from simulation.comparison.comparing import folders_of, num_runs
    from simulation.comparison.plan import read_comparison
    from simulation.comparison.table import as_cells, as_csv, as_markdown, table_of

    plan = read_comparison(comparison, overrides or ())
    folder = output or Path("runs") / plan.name
    num_workers = workers or usable_cores()
    with counting(num_runs(plan), "runs", folder) as advance:
        outcomes = run_comparison(plan, folder, num_workers, advance)
    for outcome in outcomes:
        for seed, reason in outcome.failures.items():
            say(f"{outcome.row.title} failed with seed {seed}: {reason}")
    if older := num_made_otherwise(folders_of(outcomes, folder)):
        say(
            f"{older} of the runs in {folder} were made by another version of this "
            "code; to have all from this one, delete the folder and start again"
        )
    rows = table_of(outcomes, plan.reference)
    write_atomically(folder / "table.md", as_markdown(rows))
    write_atomically(folder / "table.csv", as_csv(rows))
    if as_json:
        print_json(to_jsonable_python(rows))
        return
    header, *cells = as_cells(rows)
    print_table(header, cells)
    say(f"The table, as Markdown and as CSV with what was chosen, is in {folder}")
