"""The page of all results with filters: ``python -m docs.results_page FILE``.

A hook of mkdocs inserts all results into all_results.md.
"""

import base64
import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from docs.result_files import (
    DOCS,
    GROUPS,
    Result,
    Results,
    all_results,
)
from docs.tables import (
    cell_of,
)
from knnper.simulation.reports.pages import render_page, template_environment

PAGE = "all_results.md"
PLACEHOLDER = "<!-- all results -->"
OFFLINE = "all_results_offline.html"
# A row on the page of all results is a method on a group of clients.
FIGURES = ("average", "bottom_decile", "fraction_degraded")
COSTS = ("seconds", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Cell:
    """A cell with the value for sorting."""

    text: str
    value: float | None


def all_rows(files: Iterable[Results]) -> list[dict[str, Any]]:
    """Return the rows of the page, grouped by file."""
    rows = []
    for results in files:
        fedavg = results.reference("fedavg", "none")
        memory = results.reference("knn_per", "knn")
        for group in GROUPS:
            versus = [f"{group}_vs_{name}" if name else "" for name in (fedavg, memory)]
            figures = [f"{group}_{name}" for name in FIGURES]
            columns = [figures[0], *versus, *figures[1:], *COSTS]
            rows += [
                {
                    "results": results,
                    "result": result,
                    "group": group,
                    "cells": [_cell(name, result, results) for name in columns],
                    "seeds": len(result.line["seeds"].split()),
                }
                for result in results.results
                if result.figure(figures[0]).mean is not None
            ]
    return rows


def _cell(column: str, result: Result, results: Results) -> Cell:
    if not column:
        return Cell("-", None)
    return Cell(cell_of(column, result, results), result.figure(column).mean)


def environment() -> Environment:
    """Return the environment of the templates, including those of reports."""
    return template_environment(autoescape=True, more=[DOCS / "templates"])


def content(files: Sequence[Results]) -> dict[str, Any]:
    """Return the variables of the templates."""
    script = (DOCS / "templates/results.js").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    return {
        "files": files,
        "rows": all_rows(files),
        "script": Markup(script),
        "script_hash": base64.b64encode(digest).decode(),
    }


def fragment(files: Sequence[Results]) -> str:
    """Render all results as part of a page of the site."""
    return environment().get_template("results.html").render(content(files))


def offline_page(files: Sequence[Results]) -> str:
    """Render all results as one self-contained HTML page."""
    return render_page(environment(), "results_page.html", **content(files))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Insert all results into their page."""
    if page.file.src_uri != PAGE:
        return html
    link = f'<p><a href="{OFFLINE}">The same as one file that needs no net.</a></p>'
    return html.replace(PLACEHOLDER, link + fragment(all_results()))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the self-contained page beside the site's page."""
    page = offline_page(all_results())
    Path(config.site_dir, OFFLINE).write_text(page, encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Write the page of all results as one self-contained file."""
    if len(arguments) != 1:
        raise SystemExit("python -m docs.results_page FILE")
    Path(arguments[0]).write_text(offline_page(all_results()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
