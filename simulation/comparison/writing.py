"""The files of a comparison that is done, and what there is to show of it."""

from collections.abc import Sequence
from pathlib import Path

from knnper.durable_files import write_atomically
from simulation.batch.code import older_code
from simulation.comparison.comparing import Outcome, folders_of
from simulation.comparison.plan import Comparison
from simulation.comparison.table import TableRow, as_cells, as_csv, as_markdown
from simulation.showing import Shown, Table


def write_comparison(
    comparison: Comparison,
    outcomes: Sequence[Outcome],
    rows: Sequence[TableRow],
    folder: Path,
) -> Shown:
    """Write the table as Markdown and as CSV.

    Parameters
    ----------
    comparison
        What was run.
    outcomes
        Its rows, tuned and tested.
    rows
        `simulation.comparison.table.table_of` them.
    folder
        Holds the runs.
    """
    write_atomically(folder / "table.md", as_markdown(rows))
    write_atomically(folder / "table.csv", as_csv(rows))
    failures = [
        f"{outcome.row.title} failed with seed {seed}: {reason}"
        for outcome in outcomes
        for seed, reason in outcome.failures.items()
    ]
    older = older_code(folders_of(outcomes, folder), folder)
    table = Table.of_cells(comparison.name, as_cells(rows))
    return Shown((table,), remarks=(*failures, *older))
