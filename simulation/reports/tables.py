"""What there is to show of a finished piece of work: tables, charts and remarks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from knnper.simulation.reports.outside_text import markdown_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


VS_GLOBAL = "global"
"""The unpersonalised model of the same run, see `degraded_vs`."""


_RULE = 3
"""Of so many characters is the line below a header that Markdown takes for one."""


@dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes
    ----------
    title
        What it shows.
    header
        Names of the columns.
    rows
        The cells, as many in each row as the header has.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_cells(cls, title: str, cells: Sequence[Sequence[str]]) -> "Table":
        """Return a table of which the first row is the header."""
        header, *rows = map(tuple, cells)
        return cls(title, header, tuple(rows))

    def as_markdown(self) -> str:
        """Return header and rows as a Markdown table, all but names to the right.

        Columns are filled with spaces, so that it can be read as it is.
        """
        lines = [list(map(markdown_cell, line)) for line in (self.header, *self.rows)]
        widths = [max(_RULE, *map(len, cells)) for cells in zip(*lines, strict=True)]
        first, *others = widths
        rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
        return "".join(_padded(line, widths) for line in (lines[0], rule, *lines[1:]))


@dataclass(frozen=True)
class Chart:
    """A picture that is drawn when it is wanted.

    Attributes
    ----------
    name
        Of its files, without their endings.
    title
        What it shows.
    draw
        Returns the picture.
    """

    name: str
    title: str
    draw: "Callable[[], Figure]"


@dataclass(frozen=True)
class Shown:
    """All that there is to show.

    Attributes
    ----------
    tables, charts
        In the order in which they are read.
    remarks
        Sentences on what failed, and on what to do next.
    """

    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    remarks: tuple[str, ...] = ()


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table, the first cell to the left and the others right."""
    (name, *numbers), (first, *others) = cells, widths
    filled = [cell.rjust(width) for cell, width in zip(numbers, others, strict=True)]
    return f"| {' | '.join([name.ljust(first), *filled])} |\n"


def degraded_vs(model: str) -> str:
    """Return what tables call `fraction_degraded` of results against a model."""
    return f"degraded vs {model}"


def percent(fraction: float) -> str:
    """Return a fraction of 1 in percent, with one digit."""
    return f"{100 * fraction:.1f} %"
