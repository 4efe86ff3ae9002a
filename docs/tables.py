"""Write the result tables of the pages, and one page of all results with filters.

``docs/results/NAME.csv`` is the table.csv of `knnper compare` or `knnper sweep` for the
shipped file NAME.yaml. A page shows it between the marks ``<!-- results {files: [NAME],
columns: [...]} -->`` and ``<!-- end of results -->``. ``rows: [...]`` selects rows;
``rows: seen_average`` sorts them by this column, the largest first; ``each_also_with:
true`` or ``false`` selects the rows made by this key of the file, or the other rows.

``docs/results/points/NAME.csv`` is the points.csv, with a line for each row and seed. A
mark with ``pairs: [[first, second]]`` shows the row ``first`` minus ``second``, seed by
seed.

``docs/results/FIGURE.md`` has the tables of a figure. Its mark is ``<!-- results
{figure: FIGURE} -->``; ``table: 2`` selects the second table.

After adding or changing a file::

    python -m docs.tables                  # rewrite the tables between the marks
    python -m docs.tables --html all.html  # all results on one self-contained page
    python -m docs.tables --pair NAME FIRST SECOND  # print one difference

A hook of mkdocs inserts all results into all_results.md.
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
from knnper.simulation.reports.text import as_text, term_of
from papers.reproduce import leading_comment, split_title

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = DOCS / "results"
POINTS = "points"  # folder of the results of each seed
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

# A row on the page of all results is a method on a group of clients.
FIGURES = ("average", "bottom_decile", "fraction_degraded")
COSTS = ("seconds", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Result:
    """A row of a file: a method, or one value of a varied setting."""

    name: str
    title: str
    settings: Mapping[str, Any]  # chosen or varied settings
    line: Mapping[str, str]  # by column, under a comparison's names

    def figure(self, column: str) -> Estimate:
        """Return the mean and half of the 95 % interval of a column."""
        names = (column, f"{column}_std", f"{column}_half_width")
        mean, std, half = (
            float(text) if (text := self.line.get(name)) else None for name in names
        )
        return Estimate(mean, std, half, len(self.line["seeds"].split()))

    @property
    def has_memory(self) -> bool:
        """Whether clients use stored examples."""
        return "knn" in self.line["personalization_name"]

    @property
    def settings_text(self) -> str:
        """Chosen or varied settings as text."""
        pairs = self.settings.items()
        return ", ".join(f"{term_of(key)} {as_text(value)}" for key, value in pairs)


@dataclass(frozen=True)
class Results:
    """The rows of a file of results."""

    name: str
    results: Sequence[Result]
    is_sweep: bool

    @functools.cached_property
    def source(self) -> Path:
        """The shipped experiment file of these results."""
        for place in PLACES:
            if (path := ROOT / place / f"{self.name}.yaml").is_file():
                return path
        raise SystemExit(
            f"docs/results/{self.name}.csv: found no {self.name}.yaml in "
            f"{', '.join(PLACES)}; name it as the file that it is the table of"
        )

    @property
    def title(self) -> str:
        """Title in the shipped file."""
        comment = leading_comment(self.source.read_text(encoding="utf-8"))
        return split_title(comment)[0] or self.name

    @property
    def command(self) -> str:
        """Command in the shipped file that makes these results."""
        text = self.source.read_text(encoding="utf-8")
        pattern = rf"^#   ((?:knnper|python -m papers) \w+ .*\b{self.name}\b.*)$"
        match = re.search(pattern, text, re.MULTILINE)
        if match is None:
            raise SystemExit(f"{self.source}: found no command in its first comment")
        return match[1]

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """Titles of the rows by name."""
        return {result.name: result.title for result in self.results}

    @property
    def origin(self) -> Mapping[str, str]:
        """Partition, model and versions of the first row with results."""
        return next(result.line for result in self.results if result.line["seeds"])

    @functools.cached_property
    def references(self) -> list[str]:
        """Rows to which the averages of the other rows are compared."""
        columns = self.results[0].line
        named = (re.fullmatch(r"seen_vs_(\w+)", reference) for reference in columns)
        names = [reference[1] for reference in named if reference]
        return [
            reference
            for reference in names
            if re.sub("_(std|half_width)$", "", reference) == reference
        ]

    def reference(self, method: str, personalization: str) -> str | None:
        """Return the first reference with this method and this personaliser."""
        for name in self.references:
            line = next(result.line for result in self.results if result.name == name)
            key = line["method_name"], line["personalization_name"]
            if key == (method, personalization):
                return name
        return None


def read_results(path: Path) -> Results:
    """Read a file of results."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    is_sweep = "variant" in lines[0]
    return Results(path.stem, [_result(line, is_sweep) for line in lines], is_sweep)


def _result(line: Mapping[str, str], is_sweep: bool) -> Result:
    if not is_sweep:
        return Result(line["row"], line["method"], json.loads(line["chosen"]), line)
    figures, varied = _swept(line)
    return Result(line["variant"], line["title"], varied, figures)


def _swept(line: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a sweep's figures under a comparison's names, and its varied settings."""
    figures, varied = dict[str, str](), dict[str, Any]()
    for key, text in line.items():
        if swept := _SWEPT.fullmatch(key):
            group, of_global, figure, versus, end = swept.groups()
            named = _SHORT.get(figure, figure)
            middle = versus or f"_{'global_' if of_global else ''}{named}"
            figures[f"{group}{middle}{_ENDS[end]}"] = text
        elif "." in key and not key.endswith(tuple(filter(None, _ENDS))):
            varied[key] = yaml.safe_load(text)
        else:
            for end, other in _ENDS.items():
                if end is not None and key.endswith(end):
                    key = key.removesuffix(end) + other
            figures[key] = text
    return figures, varied


@dataclass(frozen=True)
class PointLine:
    """A row of a file of points: one run."""

    name: str  # of the method or the variant
    seed: str
    settings: Mapping[str, Any]  # what a sweep varies
    line: Mapping[str, str]  # by column, under a comparison's names

    def figure(self, column: str) -> float | None:
        """Return a figure; None if the run failed or lacks it."""
        text = self.line[column]
        return float(text) if text else None


def read_points(path: Path) -> list[PointLine]:
    """Read the runs in a file of points."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    if "variant" not in lines[0]:
        return [PointLine(line["row"], line["seed"], {}, line) for line in lines]
    points = []
    for line in lines:
        figures, varied = _swept(line)
        points.append(PointLine(line["variant"], line["seed"], varied, figures))
    return points


def differences(
    points: Sequence[PointLine], first: str, second: str, column: str
) -> list[tuple[Mapping[str, Any], Estimate]]:
    """Return ``first`` minus ``second``, seed by seed, for each varied value."""
    values_of: dict[str, tuple[Mapping[str, Any], list[float | None]]] = {}
    at = {
        (point.name, point.seed, as_text(dict(point.settings))): point
        for point in points
    }
    for (name, seed, place), point in at.items():
        if name != first:
            continue
        other = at[second, seed, place].figure(column)
        mine = point.figure(column)
        gain = None if mine is None or other is None else mine - other
        values_of.setdefault(place, (point.settings, []))[1].append(gain)
    return [(settings, estimate(gains)) for settings, gains in values_of.values()]


def all_results(folder: Path = RESULTS) -> list[Results]:
    """Read the files of a folder by name."""
    return [read_results(path) for path in sorted(folder.glob("*.csv"))]


def header_of(column: str, results: Results) -> str:
    """Return the header of a column."""
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
    """Format a figure for a table: fractions in percent with their interval."""
    if column in ("title", "batch"):
        return result.title if column == "title" else results.title
    if column in result.settings:
        return as_text(result.settings[column])
    value = result.figure(column)
    if column == "seconds":
        return value.text(1, 0)
    if column in ("bytes_up", "bytes_down"):
        return "-" if value.mean is None else f"{value.mean / _KILO:,.0f}"
    return _signed(value) if "_vs_" in column else value.text()


def marked_table(settings: Mapping[str, Any], folder: Path = RESULTS) -> str:
    """Build the table described by the settings of a mark."""
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
    cells = [[header_of(column, files[0]) for column in columns]]
    for results in files:
        cells += [
            [cell_of(column, result, results) for column in columns]
            for result in _marked_rows(results, settings)
        ]
    return Table.of_cells("", cells).as_markdown()


def paired_table(settings: Mapping[str, Any], folder: Path = RESULTS) -> str:
    """Build the table of differences described by a mark."""
    columns = settings["columns"]
    shown_columns = [column for column in columns if column != "batch"]
    cells = list[list[str]]()
    for name in settings["files"]:
        results = read_results(folder / f"{name}.csv")
        path = folder / POINTS / f"{name}.csv"
        if not path.is_file():
            raise SystemExit(f"found no {path}: its figures of each seed are not kept")
        points = read_points(path)
        varied = list(points[0].settings)
        headers = [header_of(column, results) for column in shown_columns]
        if not cells:
            batch = ["experiment"] if "batch" in columns else []
            cells.append([*batch, "difference", *map(term_of, varied), *headers])
        for first, second in settings["pairs"]:
            if missing := {first, second} - results.titles.keys():
                raise SystemExit(
                    f"{name}.csv: no row {', '.join(missing)} in {[*results.titles]}"
                )
            of_columns = [
                differences(points, first, second, column) for column in shown_columns
            ]
            title = f"{results.titles[first]} less {results.titles[second]}"
            for values in zip(*of_columns, strict=True):
                cells.append(
                    [
                        *([results.title] if "batch" in columns else []),
                        title,
                        *(as_text(values[0][0][key]) for key in varied),
                        *(_signed(gain) for _, gain in values),
                    ]
                )
    return Table.of_cells("", cells).as_markdown()


def _signed(difference: Estimate) -> str:
    is_more = (difference.mean or 0) * 100 >= _SMALL
    return f"{'+' if is_more else ''}{difference.text()}"


def _marked_rows(results: Results, settings: Mapping[str, Any]) -> Iterable[Result]:
    """Select and order the rows of a file for a mark."""
    rows = list(results.results)
    if "each_also_with" in settings:  # rows made by this key of the file, or others
        with_memory = settings["each_also_with"]
        rows = [row for row in rows if row.name.endswith("-knn") == with_memory]
    match settings.get("rows"):
        case None:
            return rows
        case str(column):
            return sorted(rows, key=lambda row: -(row.figure(column).mean or 0))
        case names:
            known = list(dict.fromkeys(row.name for row in rows))
            if missing := [row for row in names if row not in known]:
                raise SystemExit(
                    f"{results.name}.csv: no row {', '.join(missing)} in {known}"
                )
            return [row for name in names for row in rows if row.name == name]


def marks(text: str) -> list[Mapping[str, Any]]:
    """Parse the settings of all marks on a page."""
    parts = (part for part in FENCED.split(text) if not part.startswith("```"))
    matches = (_MARKED.finditer(part) for part in parts)
    return [yaml.safe_load(part[2]) for some in matches for part in some]


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """Return a page with updated tables between its marks."""

    def replace_table(match: re.Match[str]) -> str:
        begin, settings, end = match.groups()
        table = marked_table(yaml.safe_load(settings), folder)
        return f"{begin}\n{table}\n{end}"  # blank lines: Markdown needs them

    parts = FENCED.split(text)
    return "".join(
        part if part.startswith("```") else _MARKED.sub(replace_table, part)
        for part in parts
    )


def pages() -> list[Path]:
    """Return the pages that may contain marks."""
    paths = (path for path in DOCS.rglob("*.md") if path.parent != RESULTS)
    return [ROOT / "README.md", *sorted(paths)]


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
