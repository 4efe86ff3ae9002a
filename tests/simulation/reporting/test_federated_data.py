"""Runs over other data sets or partitions never share a table or a chart."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.simulation.batches.folder import Inputs, keep_inputs
from knnper.simulation.reports.report import as_html, as_markdown_report, report_of
from knnper.simulation.reports.runs import by_data, load_run
from knnper_cli.app import app
from tests.simulation.reporting.made_runs import made_run
from tests.simulation.reporting.parsed_page import Page

DIGITS = {"name": "digits"}
MIXTURE = {"name": "synthetic_mixture", "num_users": 12}
DIRICHLET = {"name": "dirichlet", "num_clients": 12, "unseen_fraction": 0.25}


def run(
    path: Path,
    data: Mapping[str, Any] = DIGITS,
    partition: Mapping[str, Any] = DIRICHLET,
    content: str = "",
    **settings: Any,
) -> Path:
    """Return a finished run over this data and partition."""
    made_run(path, **settings)
    results = json.loads((path / "results.json").read_text())
    experiment = results["manifest"]["experiment"]
    experiment |= {"data": data, "partition": partition}
    experiment |= {"model": {"name": "tiny_cnn", "embedding_dim": 8}}
    (path / "results.json").write_text(json.dumps(results))
    if content:
        keep_inputs(path, Inputs(content, None))
    return path


def tables(*paths: Path) -> list[list[str]]:
    """Return the names of the runs of each table."""
    return [[run.name for run in runs] for _, runs in by_data([*map(load_run, paths)])]


def test_each_data_set_and_partition_has_a_table(tmp_path: Path) -> None:
    other = {**DIRICHLET, "alpha": 0.1}
    paths = [
        run(tmp_path / "a"),
        run(tmp_path / "b", data=MIXTURE),
        run(tmp_path / "c", partition=other),
        run(tmp_path / "d", seed=1),
        run(tmp_path / "e", method="fedavg"),
    ]
    assert tables(*paths) == [["a", "d", "e"], ["b"], ["c"]]


def test_how_much_unseen_clients_learn_from_is_no_other_data(tmp_path: Path) -> None:
    """They are tested on the same, as a sweep of the capacity does."""
    fractions = (0.5, 1.0)
    paths = [
        run(
            tmp_path / str(fraction),
            partition={**DIRICHLET, "unseen_train_fraction": fraction},
        )
        for fraction in fractions
    ]
    assert tables(*paths) == [["0.5", "1.0"]]
    (part,) = report_of(paths).chapters
    assert "capacity" not in part.over.title
    (half, *_) = report_of(paths[:1]).chapters
    assert "capacity 0.5" in half.over.title
    assert all("unseen_train_fraction" in one.label for one in part.setups)


def test_the_same_content_is_the_same_data_wherever_it_is(tmp_path: Path) -> None:
    here, there = ({"name": "cifar10", "root": root} for root in ("here", "there"))
    paths = [
        run(tmp_path / "a", here, content="1" * 64),
        run(tmp_path / "moved", there, content="1" * 64),
        run(tmp_path / "not known", here),
        run(tmp_path / "changed", here, content="2" * 64),
    ]
    assert tables(*paths) == [["a", "moved", "not known"], ["changed"]]
    titles = [over.title for over, _ in by_data([*map(load_run, paths)])]
    assert len(set(titles)) == 2
    assert "1" * 12 in titles[0]


def test_the_top_names_data_partition_model_and_seeds(tmp_path: Path) -> None:
    paths = [run(tmp_path / str(seed), seed=seed) for seed in (3, 5)]
    report = report_of(paths)
    (chapter,) = report.chapters
    assert list(chapter.facts) == ["data set", "partition", "model", "seeds"]
    data, partition, model, seeds = chapter.facts.values()
    assert data == "Digits"
    assert "\N{GREEK SMALL LETTER ALPHA} 0.3" in partition
    assert "9 seen and 3 unseen clients" in partition
    assert "embedding_dim 8" in model
    assert seeds == "3, 5"
    page, text = Page(as_html(report)), as_markdown_report(report)
    for fact in chapter.facts.values():
        assert page.text.index(fact) < page.text.index("Seen clients")
        assert text.index(fact) < text.index("Seen clients")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [run(tmp_path / "a"), run(tmp_path / "b", data=MIXTURE)]


def test_a_page_keeps_them_apart(two: list[Path], tmp_path: Path) -> None:
    report = report_of(two)
    html = as_html(report)
    page = Page(html)
    (said,) = report.remarks
    assert said in page.text
    ids = [str(one["id"]) for _, one in page.elements if "id" in one]
    assert len(ids) == len(set(ids))
    first, second = html.split('id="part-2"')
    assert first.count("<caption>Seen clients") == 1
    assert second.count("<caption>Seen clients") == 1
    names = [section.name for section in report.sections]
    assert len(names) == len(set(names)) == 14
    text = as_markdown_report(report)
    for chapter in report.chapters:
        assert f"## {chapter.over.title}" in text
    assert text.count("### Seen clients") == 2


def test_the_command_keeps_them_apart(two: list[Path], tmp_path: Path) -> None:
    def call(*options: object) -> str:
        made = CliRunner().invoke(app, ["report", *map(str, (*two, *options))])
        assert made.exit_code == 0
        return made.stdout

    table = tmp_path / "table.csv"
    shown = call("--csv", table)
    assert shown.index("data set: Digits") < shown.index("bottom decile")
    assert shown.count("bottom decile") == 2
    rows = json.loads(call("--json"))
    assert {(one["runs"][0], one["data"]) for one in rows} == {
        ("a", "Digits"),
        ("b", "Synthetic mixture (num_users 12)"),
    }
    with table.open(newline="") as file:
        assert [one["data"] for one in csv.DictReader(file)] == [
            one["data"] for one in rows
        ]
