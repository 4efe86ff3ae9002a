"""The one report on all files: a page that needs nothing else, and Markdown."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from simulation.reporting.drawing import Picture
from simulation.reporting.files import write_text
from simulation.reporting.inline_svg import as_svg
from simulation.reporting.provenance import environment_text
from simulation.reporting.templating import render_page, template_environment
from simulation.reproducing.leading_comment import Paragraph, split_title
from simulation.reproducing.own_report import PAGE
from simulation.reproducing.playing import Played
from simulation.reproducing.protocols import REPORT
from simulation.showing import Chart, Table

_TEMPLATES = Path(__file__).with_name("templates")
_REM_PER_INCH = 7.1
"""At which letters in a chart are as large as in those of ``knnper report``."""

DONE, FAILED, MISSING = "done", "failed", "left out: its data are not there"


@dataclass(frozen=True)
class PlacedChart:
    """A chart at its place in the report.

    Attributes
    ----------
    chart
        What is drawn.
    folder
        Name of the folder of its files.
    """

    chart: Chart
    folder: str

    @property
    def title(self) -> str:
        """What it shows."""
        return self.chart.title

    @property
    def file(self) -> str:
        """Its file, from the folder of the report."""
        return f"{self.folder}/{self.chart.name}.svg"


@dataclass(frozen=True)
class DrawnChart(PlacedChart):
    """A chart inside the page.

    Attributes
    ----------
    picture
        The chart, drawn.
    """

    picture: Picture

    @property
    def width_rem(self) -> float:
        """How wide it is, by the size of the page's letters."""
        return round(float(self.picture.figure.get_figwidth()) * _REM_PER_INCH, 1)


@dataclass(frozen=True)
class Entry:
    """What the report says of a file.

    Attributes
    ----------
    played
        The file.
    output
        The folder of the report.
    """

    played: Played
    output: Path

    @property
    def name(self) -> str:
        """The name that the file gives."""
        return self.played.protocol.name

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return f"file-{self.name}"

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        return self.played.protocol.kind

    @property
    def path(self) -> str:
        """The file."""
        return str(self.played.protocol.path)

    @property
    def text(self) -> str:
        """Its content."""
        return self.played.protocol.text

    @property
    def title(self) -> str:
        """What it shows, as the file says; its name where it does not."""
        return split_title(self.played.protocol.about)[0] or self.name

    @property
    def about(self) -> Sequence[Paragraph]:
        """What the file says of itself after its title."""
        return split_title(self.played.protocol.about)[1]

    @property
    def state(self) -> str:
        """Whether it was played to its end."""
        if self.played.missing is not None:
            return MISSING
        return DONE if self.played.failure is None else FAILED

    @property
    def time(self) -> str:
        """How long it took."""
        return duration(self.played.making.seconds)

    @property
    def environment(self) -> str:
        """With what it was made."""
        return environment_text(self.played.making.environment)

    @property
    def command(self) -> str:
        """What to type to have it again."""
        return shlex.join(["knnper", "reproduce", self.path])

    @property
    def shown(self) -> bool:
        """Whether there is anything to show."""
        return self.played.shown is not None

    @property
    def warnings(self) -> Iterator[str]:
        """Why it failed or was left out, and what is remarked."""
        if self.played.failure is not None:
            yield f"This file failed. {self.played.failure}"
        if self.played.missing is not None:
            yield f"This file was left out. {self.played.missing}"
        if self.played.shown is not None:
            yield from self.played.shown.remarks

    @property
    def charts(self) -> list[DrawnChart]:
        """Its charts, drawn."""
        if self.played.shown is None:
            return []
        return [
            DrawnChart(chart, self.name, Picture(chart.draw(), _alternative(chart)))
            for chart in self.played.shown.charts
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Its tables."""
        return () if self.played.shown is None else self.played.shown.tables

    @property
    def own_report(self) -> str:
        """The page on its runs, from the folder of the report; empty without."""
        path = f"{self.name}/{PAGE}"
        return path if self.shown and (self.output / path).is_file() else ""


def _alternative(chart: Chart) -> str:
    return f"{chart.title}. The numbers are in the table."


def duration(seconds: float) -> str:
    """Return a time in words, as in ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def write_report(played: Sequence[Played], output: Path) -> Path:
    """Write the report as a page and as Markdown; return the page.

    Raises
    ------
    RunError
        If a file cannot be written.
    """
    entries = [Entry(one, output) for one in played]
    page = output / f"{REPORT}.html"
    write_text(page, as_page(entries))
    write_text(output / f"{REPORT}.md", as_markdown(entries))
    return page


def as_page(entries: Sequence[Entry]) -> str:
    """Return the report as an HTML page with its charts and its style inside."""
    environment = template_environment(autoescape=True, more=[_TEMPLATES])
    environment.filters["svg"] = _svg
    return render_page(
        environment, "reproduced.html", entries=entries, summary=summary(entries)
    )


def as_markdown(entries: Sequence[Entry]) -> str:
    """Return the report as Markdown that links the charts' files."""
    environment = template_environment(autoescape=False, more=[_TEMPLATES])
    template = environment.get_template("reproduced.md")
    return template.render(entries=entries, summary=summary(entries))


def summary(entries: Sequence[Entry]) -> str:
    """Return how many files were played, and how long that took."""
    counts = Counter(entry.state for entry in entries)
    states = (state for state in (DONE, FAILED, MISSING) if counts[state])
    told = [f"{counts[state]} {state}" for state in states]
    seconds = sum(entry.played.making.seconds for entry in entries)
    return f"Of {len(entries)}: {', '.join(told)}. {duration(seconds)} in all."


def _svg(chart: DrawnChart) -> Markup:
    # The element escapes what it is made of.
    return Markup(as_svg(chart.picture, f"{chart.folder}-{chart.chart.name}"))
