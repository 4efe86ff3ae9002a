"""The result tables of the pages, between marks: ``python -m docs.tables``.

A page shows a file of results between the marks ``<!-- results {files: [NAME],
columns: [...]} -->`` and ``<!-- end of results -->``. ``rows: [...]`` selects rows;
``rows: seen_average`` sorts them by this column, the largest first; ``each_also_with:
true`` or ``false`` selects the rows made by this key of the file, or the other rows.

A mark with ``pairs: [[first, second]]`` shows the row ``first`` minus ``second``, seed
by seed.

``docs/results/FIGURE.md`` has the tables of a figure. Its mark is ``<!-- results
{figure: FIGURE} -->``; ``table: 2`` selects the second table.

Without arguments the command rewrites the tables of all pages, after a file was added
or changed. ``--pair NAME FIRST SECOND`` prints one difference.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from docs.result_files import (
    DOCS,
    GROUPS,
    POINTS,
    RESULTS,
    ROOT,
    Result,
    Results,
    differences,
    read_points,
    read_results,
)
from knnper.simulation.reports.accuracy_table import degraded_vs
from knnper.simulation.reports.estimate import Estimate
from knnper.simulation.reports.table import Table
from knnper.simulation.reports.text import as_text, term_of

_MARKED = re.compile(
    r"(<!-- results (\{.*?\}) -->\n).*?(<!-- end of results -->)", re.DOTALL
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_SMALL = 0.05  # percent; smaller differences have no sign
_KILO = 1000


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


def main(arguments: Sequence[str]) -> None:
    """Rewrite the tables of all pages, or print one difference."""
    match arguments:
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
            raise SystemExit("python -m docs.tables [--pair NAME FIRST SECOND]")


if __name__ == "__main__":
    main(sys.argv[1:])
