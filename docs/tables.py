"""The tables of results: on the pages, and all of them on one page with filters.

``docs/results/NAME.csv`` is the table.csv that `knnper compare` or `knnper sweep` left
of the shipped file NAME.yaml. A page has a table of it between these marks, ``<!--
results {files: [NAME], columns: [...]} -->`` and ``<!-- end of results -->``, with
``rows: [...]`` of these rows, with ``rows: seen_average`` sorted by it, the largest
first, and with ``each_also_with: true`` or ``false`` of those that the file's
key of this name makes, or of the others.
``docs/results/points/NAME.csv`` is the points.csv beside it, a line for each row and
seed. Of these a mark shows differences, seed by seed: ``<!-- results {files: [NAME],
pairs: [[first, second]], columns: [...]} -->`` is the row ``first`` less ``second``.
``docs/results/FIGURE.md`` has the tables of a figure, as its command left them; its
mark is ``<!-- results {figure: FIGURE} -->``, with ``table: 2`` the second alone.
After a file came or changed::

    python -m docs.tables                  # rewrites what is between the marks
    python -m docs.tables --html all.html  # all results, one page that needs no net
    python -m docs.tables --pair NAME FIRST SECOND  # prints one difference

A hook of mkdocs puts all results into all_results.md.
"""

import base64
import csv
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from knnper.simulation.reports.accuracy_table import degraded_vs
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.pages import render_page, template_environment
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.terms import term_of
from knnper.simulation.reports.text import as_text
from papers.reproduce import leading_comment, split_title

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = DOCS / "results"
POINTS = "points"  # in the folder of results: the figures of each seed
PLACES = ("simulation/experiments", "papers", "papers/small")
PAGE, PLACEHOLDER = "all_results.md", "<!-- all results -->"
OFFLINE = "all_results_offline.html"
GROUPS = ("seen", "unseen")

# Of a sweep's file, which has more figures than a comparison's, under other names.
_SWEPT = re.compile(
    r"(seen|unseen|all)\.(global\.)?(\w+?)(_vs_\w+)?(\.sd|\.half_width)?"
)
_SHORT = {"accuracy_weighted": "average", "accuracy_bottom_decile": "bottom_decile"}
_ENDS = {".sd": "_std", ".half_width": "_half_width", None: ""}
_MARKED = re.compile(
    r"(<!-- results (\{.*?\}) -->\n).*?(<!-- end of results -->)", re.DOTALL
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_SMALL, _KILO = 0.05, 1000


@dataclass(frozen=True)
class Result:
    """A row of a file: a method, or one value of what a sweep varies."""

    name: str
    title: str
    settings: Mapping[str, Any]  # what was chosen, or is varied
    line: Mapping[str, str]  # by column, those of a sweep by a comparison's names

    def figure(self, column: str) -> Estimate:
        """Return mean and half of the 95 % interval."""
        names = (column, f"{column}_std", f"{column}_half_width")
        mean, std, half = (
            float(text) if (text := self.line.get(name)) else None for name in names
        )
        return Estimate(mean, std, half, len(self.line["seeds"].split()))

    @property
    def has_memory(self) -> bool:
        """Whether clients look at stored examples."""
        return "knn" in self.line["personalization_name"]

    @property
    def told(self) -> str:
        """What was chosen, or is varied, in words."""
        pairs = self.settings.items()
        return ", ".join(f"{term_of(key)} {as_text(value)}" for key, value in pairs)


@dataclass(frozen=True)
class Results:
    """A file of results."""

    name: str
    results: Sequence[Result]
    is_sweep: bool

    @functools.cached_property
    def source(self) -> Path:
        """The shipped file that it is of."""
        for place in PLACES:
            if (path := ROOT / place / f"{self.name}.yaml").is_file():
                return path
        raise SystemExit(
            f"docs/results/{self.name}.csv: found no {self.name}.yaml in "
            f"{', '.join(PLACES)}; name it as the file that it is the table of"
        )

    @property
    def title(self) -> str:
        """What the shipped file says that it is."""
        comment = leading_comment(self.source.read_text(encoding="utf-8"))
        return split_title(comment)[0] or self.name

    @property
    def command(self) -> str:
        """What makes it, as the shipped file says."""
        text = self.source.read_text(encoding="utf-8")
        made = rf"^#   ((?:knnper|python -m papers) \w+ .*\b{self.name}\b.*)$"
        found = re.search(made, text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{self.source}: found no command in its first comment")
        return found[1]

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """The rows' titles by name."""
        return {one.name: one.title for one in self.results}

    @property
    def origin(self) -> Mapping[str, str]:
        """Split, model and versions of the first row that has results."""
        return next(one.line for one in self.results if one.line["seeds"])

    @functools.cached_property
    def references(self) -> list[str]:
        """The rows from which the averages of the others are told."""
        columns = self.results[0].line
        named = (re.fullmatch(r"seen_vs_(\w+)", one) for one in columns)
        names = [one[1] for one in named if one]
        return [one for one in names if re.sub("_(std|half_width)$", "", one) == one]

    def reference(self, method: str, personalization: str) -> str | None:
        """Return the first reference that is this method with this on top."""
        for name in self.references:
            line = next(one.line for one in self.results if one.name == name)
            found = line["method_name"], line["personalization_name"]
            if found == (method, personalization):
                return name
        return None


def read_results(path: Path) -> Results:
    """Return what a file says."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    is_sweep = "variant" in lines[0]
    return Results(path.stem, [_result(one, is_sweep) for one in lines], is_sweep)


def _result(line: Mapping[str, str], is_sweep: bool) -> Result:
    if not is_sweep:
        return Result(line["row"], line["method"], json.loads(line["chosen"]), line)
    found, varied = _swept(line)
    return Result(line["variant"], line["title"], varied, found)


def _swept(line: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a sweep's figures by a comparison's names, and what it varies."""
    found, varied = dict[str, str](), dict[str, Any]()
    for key, text in line.items():
        if swept := _SWEPT.fullmatch(key):
            group, of_global, figure, versus, end = swept.groups()
            named = _SHORT.get(figure, figure)
            middle = versus or f"_{'global_' if of_global else ''}{named}"
            found[f"{group}{middle}{_ENDS[end]}"] = text
        elif "." in key and not key.endswith(tuple(filter(None, _ENDS))):
            varied[key] = yaml.safe_load(text)
        else:
            for end, other in _ENDS.items():
                if end is not None and key.endswith(end):
                    key = key.removesuffix(end) + other
            found[key] = text
    return found, varied


@dataclass(frozen=True)
class Point:
    """A row of a file of points: one run."""

    name: str  # of its method, or its variant
    seed: str
    settings: Mapping[str, Any]  # what a sweep varies
    line: Mapping[str, str]  # by column, those of a sweep by a comparison's names

    def figure(self, column: str) -> float | None:
        """Return a figure; None where the run failed, or has no such figure."""
        text = self.line[column]
        return float(text) if text else None


def read_points(path: Path) -> list[Point]:
    """Return the runs that a file of points is of."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    if "variant" not in lines[0]:
        return [Point(one["row"], one["seed"], {}, one) for one in lines]
    points = []
    for line in lines:
        found, varied = _swept(line)
        points.append(Point(line["variant"], line["seed"], varied, found))
    return points


def differences(
    points: Sequence[Point], first: str, second: str, column: str
) -> list[tuple[Mapping[str, Any], Estimate]]:
    """Return ``first`` less ``second``, seed by seed, for each of the values varied."""
    found: dict[str, tuple[Mapping[str, Any], list[float | None]]] = {}
    at = {(one.name, one.seed, as_text(dict(one.settings))): one for one in points}
    for (name, seed, place), point in at.items():
        if name != first:
            continue
        other = at[second, seed, place].figure(column)
        mine = point.figure(column)
        gain = None if mine is None or other is None else mine - other
        found.setdefault(place, (point.settings, []))[1].append(gain)
    return [(settings, estimate(gains)) for settings, gains in found.values()]


def all_results(folder: Path = RESULTS) -> list[Results]:
    """Return the files of a folder by name."""
    return [read_results(path) for path in sorted(folder.glob("*.csv"))]


def header_of(column: str, results: Results) -> str:
    """Return what a table calls a column."""
    group, _, figure = column.partition("_")
    if group in (*GROUPS, "all"):
        if figure.startswith("vs_"):
            return f"vs {results.titles[figure.removeprefix('vs_')]}"
        names = {"average": group, "global_average": f"{group}, global model"}
        if figure == "fraction_degraded":
            against = "" if results.is_sweep else results.references[0]
            return degraded_vs(results.titles.get(against, "global"))
        return names.get(figure, figure.replace("_", " "))
    known = {"title": "method", "seconds": "s a run", "batch": "experiment"}
    known |= {"bytes_up": "kB up", "bytes_down": "kB down"}
    return known.get(column) or term_of(column)


def cell_of(column: str, result: Result, results: Results) -> str:
    """Return a figure as tables have it: fractions in percent with their interval."""
    if column in ("title", "batch"):
        return result.title if column == "title" else results.title
    if column in result.settings:
        return as_text(result.settings[column])
    found = result.figure(column)
    if column == "seconds":
        return found.text(1, 0)
    if column in ("bytes_up", "bytes_down"):
        return "-" if found.mean is None else f"{found.mean / _KILO:,.0f}"
    return _signed(found) if "_vs_" in column else found.text()


def marked_table(settings: Mapping[str, Any], folder: Path = RESULTS) -> str:
    """Return the table that the settings of a mark ask for."""
    if "figure" in settings:
        text = (folder / f"{settings['figure']}.md").read_text(encoding="utf-8")
        if "table" in settings:
            text = text.split("\n\n")[settings["table"] - 1].strip() + "\n"
        return text
    known = {"files", "columns", "rows", "each_also_with", "pairs"}
    if unknown := settings.keys() - known:
        raise SystemExit(f"a mark of results has {', '.join(unknown)}")
    if "pairs" in settings:
        return paired_table(settings, folder)
    files = [read_results(folder / f"{name}.csv") for name in settings["files"]]
    columns = settings["columns"]
    cells = [[header_of(one, files[0]) for one in columns]]
    for results in files:
        cells += [
            [cell_of(one, result, results) for one in columns]
            for result in _marked_rows(results, settings)
        ]
    return Table.of_cells("", cells).as_markdown()


def paired_table(settings: Mapping[str, Any], folder: Path = RESULTS) -> str:
    """Return the table of differences that a mark asks for."""
    columns = settings["columns"]
    wanted = [one for one in columns if one != "batch"]
    cells = list[list[str]]()
    for name in settings["files"]:
        results = read_results(folder / f"{name}.csv")
        path = folder / POINTS / f"{name}.csv"
        if not path.is_file():
            raise SystemExit(f"found no {path}: its figures of each seed are not kept")
        points = read_points(path)
        varied = list(points[0].settings)
        headers = [header_of(one, results) for one in wanted]
        if not cells:
            batch = ["experiment"] if "batch" in columns else []
            cells.append([*batch, "difference", *map(term_of, varied), *headers])
        for first, second in settings["pairs"]:
            if missing := {first, second} - results.titles.keys():
                raise SystemExit(
                    f"{name}.csv: no row {', '.join(missing)} in {[*results.titles]}"
                )
            of_columns = [differences(points, first, second, one) for one in wanted]
            title = f"{results.titles[first]} less {results.titles[second]}"
            for found in zip(*of_columns, strict=True):
                cells.append(
                    [
                        *([results.title] if "batch" in columns else []),
                        title,
                        *(as_text(found[0][0][key]) for key in varied),
                        *(_signed(gain) for _, gain in found),
                    ]
                )
    return Table.of_cells("", cells).as_markdown()


def _signed(found: Estimate) -> str:
    is_more = (found.mean or 0) * 100 >= _SMALL
    return f"{'+' if is_more else ''}{found.text()}"


def _marked_rows(results: Results, settings: Mapping[str, Any]) -> Iterable[Result]:
    """Return the rows of a file that a mark asks for, in its order."""
    rows = list(results.results)
    if "each_also_with" in settings:  # those of a file's key, or all others
        wanted = settings["each_also_with"]
        rows = [one for one in rows if one.name.endswith("-knn") == wanted]
    match settings.get("rows"):
        case None:
            return rows
        case str(column):
            return sorted(rows, key=lambda one: -(one.figure(column).mean or 0))
        case names:
            known = list(dict.fromkeys(one.name for one in rows))
            if missing := [one for one in names if one not in known]:
                raise SystemExit(
                    f"{results.name}.csv: no row {', '.join(missing)} in {known}"
                )
            return [one for name in names for one in rows if one.name == name]


def marks(text: str) -> list[Mapping[str, Any]]:
    """Return the settings of all marks on a page."""
    parts = (one for one in FENCED.split(text) if not one.startswith("```"))
    found = (_MARKED.finditer(one) for one in parts)
    return [yaml.safe_load(one[2]) for some in found for one in some]


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """Return a page with what stands between its marks made anew."""

    def made(found: re.Match[str]) -> str:
        begin, settings, end = found.groups()
        table = marked_table(yaml.safe_load(settings), folder)
        return f"{begin}\n{table}\n{end}"  # blank lines: Markdown needs them

    parts = FENCED.split(text)
    return "".join(
        one if one.startswith("```") else _MARKED.sub(made, one) for one in parts
    )


def pages() -> list[Path]:
    """Return the pages that may have marks."""
    found = (path for path in DOCS.rglob("*.md") if path.parent != RESULTS)
    return [ROOT / "README.md", *sorted(found)]


# A row of the page of all results: a method on a group of clients.
FIGURES = ("average", "bottom_decile", "fraction_degraded")
COSTS = ("seconds", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Cell:
    """A cell that rows are sorted by."""

    text: str
    value: float | None


def all_rows(files: Iterable[Results]) -> list[dict[str, Any]]:
    """Return the rows of the page, those of a file together."""
    rows = []
    for results in files:
        fedavg = results.reference("fedavg", "none")
        memory = results.reference("knn_per", "knn")
        for group in GROUPS:
            versus = [f"{group}_vs_{one}" if one else "" for one in (fedavg, memory)]
            figures = [f"{group}_{one}" for one in FIGURES]
            columns = [figures[0], *versus, *figures[1:], *COSTS]
            rows += [
                {
                    "results": results,
                    "result": result,
                    "group": group,
                    "cells": [_cell(one, result, results) for one in columns],
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
    """Return where the templates are found, the reports' own too."""
    return template_environment(autoescape=True, more=[DOCS / "templates"])


def content(files: Sequence[Results]) -> dict[str, Any]:
    """Return what the templates show."""
    script = (DOCS / "templates/results.js").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    return {
        "files": files,
        "rows": all_rows(files),
        "script": Markup(script),
        "script_hash": base64.b64encode(digest).decode(),
    }


def fragment(files: Sequence[Results]) -> str:
    """Return all results for the inside of a page of the site."""
    return environment().get_template("results.html").render(content(files))


def offline_page(files: Sequence[Results]) -> str:
    """Return all results as one HTML page that needs no net."""
    return render_page(environment(), "results_page.html", **content(files))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Put all results into their page."""
    if page.file.src_uri != PAGE:
        return html
    link = f'<p><a href="{OFFLINE}">The same as one file that needs no net.</a></p>'
    return html.replace(PLACEHOLDER, link + fragment(all_results()))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the page that needs no net beside the site's."""
    page = offline_page(all_results())
    Path(config.site_dir, OFFLINE).write_text(page, encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Rewrite the tables of all pages, or write the page of all results."""
    match arguments:
        case ["--html", place]:
            Path(place).write_text(offline_page(all_results()), encoding="utf-8")
        case []:
            for path in pages():
                text = path.read_text(encoding="utf-8")
                if (now := rewritten(text)) != text:
                    path.write_text(now, encoding="utf-8")
                    sys.stdout.write(f"{path.relative_to(ROOT)}\n")
        case ["--pair", name, first, second]:
            columns = [f"{group}_average" for group in GROUPS]
            pair = {"files": [name], "pairs": [[first, second]], "columns": columns}
            sys.stdout.write(paired_table(pair))
        case _:
            raise SystemExit(
                "python -m docs.tables [--html FILE | --pair NAME FIRST SECOND]"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
