"""Tables, charts and remarks to show, and rows as CSV."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from knnper.simulation.reports.text import markdown_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RULE = 3  # characters at least of the line below a header in Markdown


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_cells(cls, title: str, cells: Sequence[Sequence[str]]) -> "Table":
        """Return a table of which the first row is the header."""
        header, *rows = map(tuple, cells)
        return cls(title, header, tuple(rows))

    def as_markdown(self) -> str:
        """Return header and rows as a Markdown table, all but names to the right."""
        lines = [list(map(markdown_cell, line)) for line in (self.header, *self.rows)]
        columns = zip(*lines, strict=True)
        first, *others = (max(_RULE, *map(len, cells)) for cells in columns)
        lines.insert(1, ["-" * first, *("-" * (one - 1) + ":" for one in others)])
        padded = (
            [name.ljust(first), *map(str.rjust, numbers, others)]
            for name, *numbers in lines
        )
        return "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


@dataclass(frozen=True)
class Chart:
    """A picture that is drawn when it is wanted."""

    name: str
    title: str
    draw: "Callable[[], Figure]"


@dataclass(frozen=True)
class Shown:
    """All that there is to show."""

    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    remarks: tuple[str, ...] = ()


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns of the one that has most of them."""
    text, header = io.StringIO(), max(rows, key=len, default={})
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        as_json = {
            key: json.dumps(value)
            for key, value in row.items()
            if isinstance(value, list | dict | bool)
        }
        writer.writerow({**row, **as_json})
    return text.getvalue()
