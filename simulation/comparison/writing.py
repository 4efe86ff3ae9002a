"""The files of a comparison that is done, and what there is to show of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from knnper.durable_files import write_atomically
from simulation.batch.code import older_code
from simulation.batch.families import failure_remark, folder_of
from simulation.batch.folder import TABLE
from simulation.batch.playing import FAILED
from simulation.comparison.comparing import Outcome, folders_of
from simulation.comparison.plan import Comparison
from simulation.comparison.table import TableRow, as_cells, as_csv, spread_remark
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
    table = Table.of_cells(comparison.name, as_cells(rows, comparison.reference))
    spread = spread_remark(rows, len(comparison.seeds))
    told = [] if spread is None else [spread]
    below = "".join(f"\n{line}\n" for line in told)
    write_atomically(folder / TABLE, table.as_markdown() + below)
    write_atomically(folder / "table.csv", as_csv(rows))
    older = older_code(folders_of(outcomes, folder), folder)
    failures = (*_not_chosen(outcomes), *_failures(outcomes, folder))
    return Shown((table,), remarks=(*told, *failures, *older))


def _not_chosen(outcomes: Sequence[Outcome]) -> Iterator[str]:
    tried = [one for outcome in outcomes for one in outcome.tried]
    failed = [one for one in tried if one.failure is not None]
    if failed:
        yield (
            f"{len(failed)} of {len(tried)} candidates failed on validation data and "
            f"were not chosen; {FAILED} in the folder of each run says why. To make "
            "one again, delete its folder"
        )


def _failures(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    for outcome in outcomes:
        for seed, reason in outcome.failures.items():
            run = folder_of(outcome.chosen.tested(seed), folder)
            yield failure_remark(outcome.row.title, seed, reason, run)
