"""Tables, charts and remarks to show, and rows as CSV."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from knnper.simulation.reports.text import markdown_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHORTEST_RULE = 3  # dashes that Markdown needs below a header


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_cells(cls, title: str, cells: Sequence[Sequence[str]]) -> "Table":
        """Build a table from cells; the first row is the header."""
        header, *rows = map(tuple, cells)
        return cls(title, header, tuple(rows))

    def as_markdown(self) -> str:
        """Return the table in Markdown, all columns but the first right-aligned."""
        lines = [list(map(markdown_cell, line)) for line in (self.header, *self.rows)]
        columns = zip(*lines, strict=True)
        first, *others = (max(_SHORTEST_RULE, *map(len, cells)) for cells in columns)
        lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
        padded = (
            [name.ljust(first), *map(str.rjust, numbers, others)]
            for name, *numbers in lines
        )
        return "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


@dataclass(frozen=True)
class Chart:
    """A chart by name."""

    name: str
    title: str
    figure: "Figure"


@dataclass(frozen=True)
class Shown:
    """The tables, charts and remarks that a command shows."""

    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    remarks: tuple[str, ...] = ()


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with the columns of the longest row; None is empty.

    Lists, mappings and truth values are written as JSON.
    """
    longest: Mapping[str, Any] = max(rows, key=len, default={})
    columns = list(longest)
    table = pd.DataFrame(
        [[_csv_cell(row.get(column)) for column in columns] for row in rows],
        columns=columns,
        dtype="object",
    )
    return str(table.to_csv(index=False, lineterminator="\n"))


def _csv_cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict | bool) else value
