"""A report as an HTML page, as Markdown or in a notebook."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.simulation.reports.accuracy_table import degraded_columns
from knnper.simulation.reports.estimate import WEAK_NOTE
from knnper.simulation.reports.picture import MOST_SHOWN, THEMED, as_svg
from knnper.simulation.reports.report import Report, report_of
from knnper.simulation.reports.sections import Section
from knnper.simulation.reports.text import markdown_cell, markdown_text

_TEMPLATES = Path(__file__).with_name("templates")


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; parents are created as needed."""
    # Folder names may hold surrogates for undecodable bytes, as in a C locale.
    content = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def template_environment(*, autoescape: bool, more: Sequence[Path] = ()) -> Environment:
    """Return a Jinja environment with the reports' templates and those in ``more``."""
    environment = Environment(
        autoescape=autoescape,
        loader=FileSystemLoader([_TEMPLATES, *more]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = markdown_cell
    environment.filters["text"] = markdown_text
    environment.globals["degraded"] = degraded_columns
    environment.globals["weak_note"] = WEAK_NOTE
    return environment


def render_page(environment: Environment, name: str, **content: object) -> str:
    """Render a template that extends ``page.html``, with the style sheet inside."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(name).render(
        **content, style=Markup(style), themed=THEMED
    )


def as_html(report: Report) -> str:
    """Return the report as one HTML page, charts and style sheet inside."""
    environment = template_environment(autoescape=True)
    environment.filters["chart"] = _chart
    content = {"report": report, "most_open": MOST_SHOWN}
    return render_page(environment, "report.html", **content)


def as_notebook_html(run: Path) -> str:
    """Return the verdict on one run and its tables as HTML for a notebook."""
    (chapter,) = report_of([run]).chapters
    template = template_environment(autoescape=True).get_template("notebook.html")
    return template.render(chapter=chapter)


def as_markdown_report(report: Report, figures: Path | None = None) -> str:
    """Return the report as Markdown; charts are files in ``figures``, or text."""
    template = template_environment(autoescape=False).get_template("report.md")
    return template.render(report=report, figures=figures)


def _chart(section: Section) -> Markup:
    if section.picture is None:
        return Markup("")
    # ElementTree has escaped its texts and attributes.
    return Markup(as_svg(section.picture, section.name))
