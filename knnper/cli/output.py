"""What goes to standard output, and what to standard error."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knnper.transport.foreign_text import harmless

if TYPE_CHECKING:
    from simulation.showing import Shown

# Standard output may be read by a program or go to a file: no line is cut there.
_FILE_WIDTH = 200


def print_json(document: Any) -> None:
    """Write plain values as JSON to standard output."""
    # JSON leaves some of what steers a terminal as it is.
    typer.echo(harmless(json.dumps(document, indent=2, ensure_ascii=False)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output."""
    table = Table(*map(_cell, header))
    for row in rows:
        table.add_row(*map(_cell, row))
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table)


def _cell(text: str) -> str:
    """Return a text as rich takes it for what it says, and no terminal for more."""
    return escape(harmless(text))


def print_shown(shown: "Shown") -> None:
    """Write tables to standard output, titles and remarks to standard error."""
    for table in shown.tables:
        say(table.title)
        print_table(table.header, table.rows)
    say_remarks(shown)


def say_remarks(shown: "Shown") -> None:
    """Write what there is to remark to standard error."""
    for remark in shown.remarks:
        say(remark)


def print_shown_or_json(shown: "Shown", document: Any, *, as_json: bool) -> None:
    """Write the tables, or in their place plain values as JSON; remarks in any case."""
    if as_json:
        print_json(document)
        say_remarks(shown)
    else:
        print_shown(shown)


def say(message: str) -> None:
    """Write a line for people to standard error."""
    typer.echo(harmless(message), err=True)


def tell(message: str) -> None:
    """Write a line for people to standard output."""
    typer.echo(harmless(message))
