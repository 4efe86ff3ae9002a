"""What there is to show of finished work: tables, charts, remarks, outside names."""

import csv
import io
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


VS_GLOBAL = "global"
"""The unpersonalised model of the same run, see `degraded_vs`."""


_RULE = 3
"""Of so many characters is the line below a header that Markdown takes for one."""


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
        widths = [max(_RULE, *map(len, cells)) for cells in zip(*lines, strict=True)]
        first, *others = widths
        rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
        return "".join(_padded(line, widths) for line in (lines[0], rule, *lines[1:]))


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


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table, the first cell to the left and the others right."""
    (name, *numbers), (first, *others) = cells, widths
    filled = [cell.rjust(width) for cell, width in zip(numbers, others, strict=True)]
    return f"| {' | '.join([name.ljust(first), *filled])} |\n"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns of the one that has most of them."""
    text = io.StringIO()
    header = max(rows, key=len, default={})
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as one cell holds it: lists and mappings as JSON."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def degraded_vs(model: str) -> str:
    """Return what tables call `fraction_degraded` of results against a model."""
    return f"degraded vs {model}"


def percent(fraction: float) -> str:
    """Return a fraction of 1 in percent, with one digit."""
    return f"{100 * fraction:.1f} %"


_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode: control characters, halves of characters, ends of lines."""


_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Return a text with a space for each character that is none, or ends a line."""
    return "".join(" " if _is_no_text(one) else one for one in text)


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as a part of a line of Markdown, in which it is no HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def _is_no_text(character: str) -> bool:
    return unicodedata.category(character) in _NO_TEXT or character in _NOT_IN_XML
