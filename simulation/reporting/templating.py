"""Templates of pages and texts, and what all pages have in common."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from simulation.outside_text import markdown_cell, markdown_text
from simulation.reporting.inline_svg import THEMED

_TEMPLATES = Path(__file__).with_name("templates")


def template_environment(*, autoescape: bool, more: Sequence[Path] = ()) -> Environment:
    """Return where templates are found: the reports' own and those in other folders."""
    environment = Environment(
        autoescape=autoescape,
        loader=FileSystemLoader([_TEMPLATES, *more]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = markdown_cell
    environment.filters["text"] = markdown_text
    return environment


def render_page(environment: Environment, name: str, **content: object) -> str:
    """Return the page of a template that extends ``page.html``, its style inside."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(name).render(
        **content, style=Markup(style), themed=THEMED
    )
