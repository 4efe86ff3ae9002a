"""The tables and figures on the pages are those of the files of results."""

import base64
import hashlib
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from docs import results_page, tables
from docs.result_files import (
    POINTS,
    RESULTS,
    all_results,
    read_points,
    read_results,
)
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.sweep import Sweep
from knnper.simulation.reports.estimate import estimate
from tests.docs.plan_files import read_plan_file

ROOT = Path(__file__).resolve().parents[2]
PAGES = [str(path.relative_to(ROOT)) for path in tables.pages()]
FILES = [results.name for results in all_results()]
QUOTED = re.compile(r"(\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")
# What its commands print is listed there; they are part of the page.
OUTPUTS = "docs/tutorials/"


@cache
def known() -> set[tuple[str, str]]:
    """Return all means with half of their intervals, as pages have them."""
    figures = set()
    for results in all_results():
        for result in results.results:
            for column in result.line:
                if f"{column}_half_width" in result.line:
                    text = result.figure(column).text()
                    figures |= {match.groups() for match in QUOTED.finditer(text)}
    texts = [path.read_text() for path in RESULTS.glob("*.md")]
    for text in (*texts, *differences()):
        figures |= {match.groups() for match in QUOTED.finditer(text)}
    return figures  # type: ignore[return-value]


def differences() -> list[str]:
    """Return all tables of differences that pages have."""
    pages = (page.read_text(encoding="utf-8") for page in tables.pages())
    marks = itertools.chain.from_iterable(map(tables.marks, pages))
    return [tables.marked_table(mark) for mark in marks if "pairs" in mark]


def quoted(page: str) -> list[str]:
    """Return the figures of a page that are in no file, with their lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    # Listings are what a command prints.
    without = tables.FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        f"{page}:{number}: {match[0]}"
        for number, line in enumerate(without.splitlines(), start=1)
        for match in QUOTED.finditer(line)
        if match.groups() not in known()
    ]


@pytest.mark.parametrize("page", PAGES)
def test_tables_equal_the_result_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "python -m docs.tables writes them anew"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.startswith(OUTPUTS)]
)
def test_quoted_figures_are_in_result_files(page: str) -> None:
    unknown = quoted(page)
    assert not unknown, "these figures are in no file of docs/results:\n" + "\n".join(
        unknown
    )


@pytest.mark.parametrize("name", FILES)
def test_result_file_matches_its_shipped_file(name: str) -> None:
    results = read_results(RESULTS / f"{name}.csv")
    plan = read_plan_file(results.source).plan
    assert isinstance(plan, Comparison | Sweep)
    assert results.titles == {
        name: points[0].title for name, points in plan.variants.items()
    }
    assert results.references == [*plan.references]
    for result in results.results:
        assert result.line["batch"] == plan.name
        # Fewer where a run diverged.
        assert {*result.line["seeds"].split()} <= {*map(str, plan.seeds)}
        if isinstance(plan, Sweep):
            points = plan.variants[result.name]
            assert result.settings in [point.values for point in points]
    text = (RESULTS / f"{name}.csv").read_text(encoding="utf-8")
    assert not re.search(r"(^|[\s\"'=])/(tmp|home|work|root)\b", text)
    assert results.command.split()[0] in ("knnper", "python")


@pytest.mark.parametrize(
    "name",
    [path.stem for path in (RESULTS / POINTS).glob("*.csv")],
)
def test_points_average_to_the_table(name: str) -> None:
    results = read_results(RESULTS / f"{name}.csv")
    points = read_points(RESULTS / POINTS / f"{name}.csv")
    assert results.results
    for result in results.results:
        runs = [
            point
            for point in points
            if point.name == result.name
            and point.settings == (result.settings if results.is_sweep else {})
        ]
        finished = [point for point in runs if point.figure("seen_average") is not None]
        assert [point.seed for point in finished] == result.line["seeds"].split()
        for column in ("seen_average", "unseen_average", "seen_bottom_decile"):
            expected = result.figure(column)
            counted = estimate(point.figure(column) for point in finished)
            assert counted.mean == pytest.approx(expected.mean)
            assert counted.half_width == pytest.approx(expected.half_width)
        assert {point.line["code"] for point in finished} == {
            *result.line["code"].split("; ")
        }


HEADER = "seen_average,seen_average_half_width,seen_vs_a,seen_vs_a_half_width,bytes_up"
BY_HAND = f"""row,method,chosen,seeds,{HEADER}
a,A,{{}},0 1,0.5,0.125,0,0,2500
b,B,"{{""training.learning_rate"": 0.1}}",0 1,0.625,0.25,0.125,0.0625,
"""
SWEPT = """variant,training.num_rounds,num_runs,unseen.accuracy_weighted,\
unseen.accuracy_weighted.sd,unseen.accuracy_weighted.half_width,\
unseen.global.accuracy_weighted,unseen.accuracy_weighted_vs_a,title,seeds
a,5,1,0.5,,,0.25,-0.125,A,0
"""


def test_marked_tables_by_hand(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text(BY_HAND)
    (tmp_path / "swept.csv").write_text(SWEPT)
    (tmp_path / "drawn.md").write_text("| a |\n\n| b |\n")
    for place, text in ({}, "| a |\n\n| b |\n"), ({"table": 1}, "| a |\n"):
        assert tables.marked_table({"figure": "drawn", **place}, tmp_path) == text
    few = (
        "{files: [few], columns: [title, seen_average, seen_vs_a, bytes_up], rows: [b]}"
    )
    page = f"<!-- results {few} -->\nold\n<!-- end of results -->\n"
    assert tables.rewritten(page, tmp_path) == (
        f"<!-- results {few} -->\n\n"
        "| method |         seen |         vs A | kB up |\n"
        "| ------ | -----------: | -----------: | ----: |\n"
        "| B      | 62.5 ± 25.0* | +12.5 ± 6.2* |     - |\n"
        "\n<!-- end of results -->\n"
    )
    assert (
        tables.rewritten(f"```text\n{page}```\n", tmp_path) == f"```text\n{page}```\n"
    )
    swept = {"files": ["swept"], "columns": ["training.num_rounds", "unseen_vs_a"]}
    swept["columns"] += ["unseen_global_average"]
    assert tables.marked_table(swept, tmp_path).splitlines()[2] == (
        "| 5      | -12.5 |                 25.0 |"
    )
    named = {"files": ["few"], "columns": ["title"]}
    for choice, rows in (
        ({}, ["A", "B"]),
        ({"rows": "seen_average"}, ["B", "A"]),
        ({"each_also_with": False}, ["A", "B"]),
        ({"each_also_with": True}, []),
    ):
        table = tables.marked_table({**named, **choice}, tmp_path)
        assert [line.strip("| ") for line in table.splitlines()[2:]] == rows
    with pytest.raises(SystemExit, match=r"few\.csv: no row c"):
        tables.marked_table(
            {"files": ["few"], "columns": ["title"], "rows": ["c"]}, tmp_path
        )


SEEDS = """row,seed,run,failure,code,seen_average
a,0,x,,commit 1,0.5
a,1,y,,commit 1,0.75
b,0,z,,commit 1,0.625
b,1,w,,commit 1,1
"""
SWEPT_SEEDS = """variant,training.num_rounds,seed,run,failure,code,\
unseen.accuracy_weighted
a,5,0,x,,commit 1,0.5
b,5,0,y,,commit 1,0.25
a,9,0,z,,commit 1,0.5
b,9,0,,diverged,,
"""


def test_difference_of_two_rows_is_per_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / POINTS).mkdir()
    swept = SWEPT + "b,5,1,0.25,,,0.25,-0.125,B,0\n"
    for name, table, points in (
        ("few", BY_HAND, SEEDS),
        ("swept", swept, SWEPT_SEEDS),
    ):
        (tmp_path / f"{name}.csv").write_text(table)
        (tmp_path / POINTS / f"{name}.csv").write_text(points)
    pair = {"files": ["few"], "pairs": [["b", "a"]], "columns": ["seen_average"]}
    table = tables.marked_table(pair, tmp_path)
    # 12.5 and 25 points: the mean is 18.75, t · 8.839 / √2 = 79.4.
    assert table == (
        "| difference |          seen |\n"
        "| ---------- | ------------: |\n"
        "| B less A   | +18.8 ± 79.4* |\n"
    )
    of_sweep = {**pair, "files": ["swept"], "columns": ["unseen_average"]}
    lines = tables.marked_table(of_sweep, tmp_path).splitlines()
    assert lines == [
        "| difference | rounds | unseen |",
        "| ---------- | -----: | -----: |",
        "| B less A   |      5 |  -25.0 |",
        "| B less A   |      9 |      - |",
    ]
    monkeypatch.setattr(tables.paired_table, "__defaults__", (tmp_path,))
    monkeypatch.setattr(tables, "GROUPS", ("seen",))
    tables.main(["--pair", "few", "b", "a"])
    assert capsys.readouterr().out == table
    with pytest.raises(SystemExit, match=r"few\.csv: no row c"):
        tables.marked_table({**pair, "pairs": [["c", "a"]]}, tmp_path)
    (tmp_path / POINTS / "few.csv").unlink()
    with pytest.raises(SystemExit, match="figures of each seed are not kept"):
        tables.marked_table(pair, tmp_path)


def test_page_of_all_results_needs_no_network() -> None:
    files = all_results()
    page = results_page.offline_page(files)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not re.search(r"(src|href)=\"(?!#)", page.split("<body>")[1])
    assert page.count("<tr data-experiment") == len(results_page.all_rows(files))
    for results in files:
        assert f"<code>{results.command}</code>" in page
        assert f'id="results-{results.name}"' in page


def test_differences_are_to_fedavg_and_to_knn_per() -> None:
    demo = [row for row in all_results() if row.name == "demo_seeds"]
    rows = {
        (row["result"].name, row["group"]): row["cells"]
        for row in results_page.all_rows(demo)
    }
    average, vs_fedavg, vs_knn_per = rows["knn_per", "seen"][:3]
    assert average.value == pytest.approx(
        vs_fedavg.value + rows["fedavg", "seen"][0].value
    )
    assert vs_knn_per.text == "-"
