"""What there is to show of a finished piece of work: tables, charts and remarks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from simulation.outside_text import markdown_row


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
        """Return header and rows as a Markdown table, numbers to the right."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = (self.header, rule, *self.rows)
        return "".join(f"{markdown_row(line)}\n" for line in lines)


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
    draw: Callable[[], Figure]


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


def percent(fraction: float) -> str:
    """Return a fraction of 1 in percent, with one digit."""
    return f"{100 * fraction:.1f} %"
