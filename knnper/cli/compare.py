"""``knnper compare``: methods side by side, tuned on validation data."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.errors import INTERRUPTED
from knnper.cli.options import AsJson, Overrides
from knnper.cli.output import print_json, print_table, say

ComparisonFile = Annotated[
    Path, typer.Argument(metavar="COMPARISON.yaml", help="The comparison's file.")
]
Output = Annotated[
    Path | None, typer.Option(help="The folder of all its runs.", show_default="NAME")
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
    from simulation.comparison.comparing import compare as run_comparison
    from simulation.comparison.comparing import num_runs
    from simulation.comparison.settings import read_comparison
    from simulation.comparison.table import as_cells, as_csv, as_markdown, table_of

    plan = read_comparison(comparison, overrides or ())
    folder = output or Path("runs") / plan.name
    with _counting(num_runs(plan), comparison, folder) as advance:
        num_workers = workers or len(os.sched_getaffinity(0))
        outcomes = run_comparison(plan, folder, num_workers, advance)
    rows = table_of(outcomes, plan.reference)
    write_atomically(folder / "table.md", as_markdown(rows))
    write_atomically(folder / "table.csv", as_csv(rows))
    if as_json:
        print_json(to_jsonable_python(rows))
        return
    header, *cells = as_cells(rows)
    print_table(header, cells)
    say(f"The table, as Markdown and as CSV with what was chosen, is in {folder}")


@contextlib.contextmanager
def _counting(total: int, file: Path, folder: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many more runs are done."""
    from knnper.cli.progress import run_counter

    try:
        with run_counter(total) as advance:
            yield advance
    except KeyboardInterrupt as error:
        say(f"Interrupted. To go on: knnper compare {file} --output {folder}")
        raise typer.Exit(INTERRUPTED) from error
