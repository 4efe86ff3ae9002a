"""Output of commands: lines, tables and JSON."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knnper.cli.plain_text import in_encoding_of, is_unicode
from knnper.errors import harmless

if TYPE_CHECKING:
    from knnper.simulation.reports.table import Shown

# The installed module with `server_app` and `client_app`; importing it loads torch.
APPS = "knnper.cli.flower_apps"
CLIENT_APP = f"{APPS}:client_app"

# Without a terminal, a program may read the output, so no line is cut.
_FILE_WIDTH = 200
_UNLIMITED_WIDTH = 10_000
MOST_LISTED = 10  # lines of a list


def print_json(document: Any) -> None:
    """Write plain values as JSON to standard output."""
    # Escape characters that the stream cannot write.
    ascii_only = not is_unicode(sys.stdout)
    tell(json.dumps(document, indent=2, ensure_ascii=ascii_only))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    table = _table(header, rows)
    unlimited = console.options.update(max_width=_UNLIMITED_WIDTH)
    if console.measure(table, options=unlimited).maximum > console.width:
        # Drop the lines between columns. If that is not enough, cells are wrapped, but
        # not the names, unless they take most of the width.
        table = _table(header, rows, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        names = max((len(row[0]) for row in rows), default=0)
        table.columns[0].no_wrap = names <= console.width // 2
    console.print(table)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], **options: Any
) -> Table:
    table = Table(**options)
    for name in header:
        table.add_column(_cell(name), overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> str:
    """Escape rich's markup, terminal controls and characters that cannot be written.

    Before the layout, so that columns fit the written characters.
    """
    return escape(in_encoding_of(sys.stdout, harmless(text)))


def print_shown(shown: "Shown", document: Any = None) -> None:
    """Write the tables, or ``document`` as JSON if given, and the remarks."""
    if document is not None:
        print_json(document)
    else:
        for table in shown.tables:
            say(table.title)
            print_table(table.header, table.rows)
    for remark in shown.remarks:
        say(remark)


def show_run(folder: Path) -> None:
    """Write the verdict and the tables of a finished run."""
    from knnper.simulation.reports.accuracy_table import tables_of_run
    from knnper.simulation.reports.verdict import verdict_of_run

    for sentence in verdict_of_run(folder):
        tell(sentence)
    for header, *rows in tables_of_run(folder):
        print_table(header, rows)
    say(f"All files of this run are in {folder}")


def say(message: str) -> None:
    """Write a message to standard error."""
    # The stream is explicit, since click would write UTF-8 to an ASCII stream.
    typer.echo(harmless(message), file=sys.stderr)


def tell(message: str = "", *, nl: bool = True) -> None:
    """Write a line of the result to standard output."""
    typer.echo(harmless(message), file=sys.stdout, nl=nl)


def tell_list(title: str, lines: Iterable[str], count: int | None = None) -> None:
    """Write a title with a count, and the first lines below it.

    ``count`` is the total if ``lines`` has only the first lines.
    """
    listed = list(lines)
    total = len(listed) if count is None else count
    num_shown = min(len(listed), MOST_LISTED)
    tell(f"{title}: {total}")
    for line in listed[:num_shown]:
        tell(f"  - {line}")
    if total > num_shown:
        tell(f"  - and {total - num_shown} more")
