"""A report as one HTML page that needs nothing else, and as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from simulation.reporting.drawing import MOST_SHOWN
from simulation.reporting.inline_svg import as_svg
from simulation.reporting.report import Report
from simulation.reporting.runs import GROUPS
from simulation.reporting.sections import Section
from simulation.reporting.table import (
    Row,
    degraded_columns,
    number,
    points,
    seconds_of,
)
from simulation.reporting.templating import render_page, template_environment


def as_html(report: Report) -> str:
    """Return the report as an HTML page with its charts and its style inside."""
    environment = _environment(autoescape=True)
    environment.filters["chart"] = _chart
    content = _content(report)
    return render_page(environment, "report.html", **content, most_open=MOST_SHOWN)


def as_markdown_report(report: Report, figures: Path | None = None) -> str:
    """Return the report as Markdown; charts are told by their alternative texts.

    Parameters
    ----------
    figures
        The folder of the chart's files, for links; without it there are none.
    """
    environment = _environment(autoescape=False)
    template = environment.get_template("report.md")
    return template.render(**_content(report), figures=figures)


def _environment(*, autoescape: bool) -> Environment:
    environment = template_environment(autoescape=autoescape)
    environment.filters.update(points=points, number=number, seconds=seconds_of)
    return environment


def _content(report: Report) -> dict[str, object]:
    return {"report": report, "by_group": _by_group, "degraded": degraded_columns}


def _by_group(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    groups = {name: [row for row in rows if row.group == name] for name in GROUPS}
    return {name: found for name, found in groups.items() if found}


def _chart(section: Section) -> Markup:
    if section.picture is None:
        return Markup("")
    # The element escapes what it is made of.
    return Markup(as_svg(section.picture, section.name))
