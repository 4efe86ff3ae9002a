"""The report of ``python -m papers reproduce``."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from knnper.simulation.reports.pages import (
    render_page,
    template_environment,
    write_text,
)
from knnper.simulation.reports.picture import DescribedChart, as_svg
from knnper.simulation.reports.provenance import environment_text
from knnper.simulation.reports.table import Chart, Shown
from papers.durations import TimeSpent
from papers.files import REPORT, File, Paragraph, leading_comment, split_title

COMMAND = ("python", "-m", "papers", "reproduce")
DONE = "done"
FAILED = "failed"
MISSING = "left out: its data are not there"
PAGE = "report.html"
_TEMPLATES = Path(__file__).with_name("templates")
# At this width, letters are as large as in charts of ``knnper report``.
_REM_PER_INCH = 7.1


@dataclass(frozen=True)
class Made:
    """A file and its result, for the report."""

    file: File
    output: Path
    time_spent: TimeSpent
    shown: Shown | None = None
    failure: str | None = None
    missing: str | None = None

    @property
    def title(self) -> str:
        """Title in the file, or else its name."""
        return split_title(leading_comment(self.file.text))[0] or self.file.name

    @property
    def about(self) -> Sequence[Paragraph]:
        """Paragraphs after the title in the file."""
        return split_title(leading_comment(self.file.text))[1]

    @property
    def state(self) -> str:
        """Done, failed or missing data."""
        if self.missing is not None:
            return MISSING
        return DONE if self.failure is None else FAILED

    @property
    def time(self) -> str:
        """Duration in words."""
        return duration(self.time_spent.seconds)

    @property
    def environment(self) -> str:
        """Versions and machine."""
        return environment_text(self.time_spent.environment)

    @property
    def command(self) -> str:
        """Command that makes the file again."""
        return shlex.join([*COMMAND, str(self.file.path)])

    @property
    def warnings(self) -> Iterator[str]:
        """Reason for a failure or omission, and remarks."""
        if self.failure is not None:
            yield f"This file failed. {self.failure}"
        if self.missing is not None:
            yield f"This file was left out. {self.missing}"
        if self.shown is not None:
            yield from self.shown.remarks

    @property
    def own_report(self) -> str:
        """Path of the page on its runs, relative to the report, or empty."""
        path = f"{self.file.name}/{PAGE}"
        return path if self.shown and (self.output / path).is_file() else ""


def duration(seconds: float) -> str:
    """Format a duration, as in ``2 min 05 s``."""
    minutes, seconds_over = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_over:02d} s" if minutes else f"{seconds_over} s"


def write_report(results: Sequence[Made], output: Path) -> Path:
    """Write the report as HTML and Markdown; return the path of the page."""
    page = output / f"{REPORT}.html"
    content = {"entries": results, "summary": summary(results)}
    environment = template_environment(autoescape=True, more=[_TEMPLATES])
    environment.globals["figure"] = _chart
    write_text(page, render_page(environment, "reproduced.html", **content))
    environment = template_environment(autoescape=False, more=[_TEMPLATES])
    text = environment.get_template("reproduced.md").render(**content)
    write_text(output / f"{REPORT}.md", text)
    return page


def summary(results: Sequence[Made]) -> str:
    """Summarise the number of files by state, and the total time."""
    counts = Counter(result.state for result in results)
    parts = [
        f"{counts[state]} {state}" for state in (DONE, FAILED, MISSING) if counts[state]
    ]
    seconds = sum(result.time_spent.seconds for result in results)
    return f"Of {len(results)}: {', '.join(parts)}. {duration(seconds)} in all."


def _chart(result: Made, chart: Chart) -> Markup:
    """Return a chart as an HTML element."""
    alternative = f"{chart.title}. The numbers are in the table."
    picture = DescribedChart(chart.figure, alternative)
    width = round(float(picture.figure.get_figwidth()) * _REM_PER_INCH, 1)
    # Chart and title are escaped by the element.
    drawn = Markup(as_svg(picture, f"{result.file.name}-{chart.name}"))
    return Markup(
        '<figure style="max-width: {}rem">{}<figcaption>{}</figcaption></figure>'
    ).format(width, drawn, chart.title)
