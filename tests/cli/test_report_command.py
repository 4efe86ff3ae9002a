import csv
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper_cli.app import app
from tests.simulation.reporting.made_runs import made_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two seeds of one setup, in a working folder of their own."""
    monkeypatch.chdir(tmp_path)
    return [made_run(Path("runs") / f"seed{seed}", seed=seed) for seed in (0, 1)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_seeds_are_one_row(runs: list[Path]) -> None:
    rows = json.loads(run(*runs, "--json").stdout)
    assert {(row["label"], tuple(row["runs"])) for row in rows} == {
        ("FedAvg", ("seed0", "seed1")),
        ("kNN-Per", ("seed0", "seed1")),
    }
    # The folder that holds them is as good.
    assert json.loads(run("runs", "--json").stdout) == rows


def test_all_files(runs: list[Path]) -> None:
    made = run(
        *runs, "--html", "out/report.html", "--csv", "table.csv", "--figures", "charts"
    )
    assert made.exit_code == 0
    assert "±" in made.stdout
    assert "The report is in out/report.html" in made.stderr
    assert Path("out/report.html").read_text().startswith("<!DOCTYPE html>")
    with Path("table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["label"] for row in table] == ["FedAvg", "kNN-Per"] * 2
    assert Path("charts/weights.pdf").is_file()


def test_markdown_links_the_charts(runs: list[Path]) -> None:
    text = run(*runs, "--markdown", "--figures", "charts").stdout
    assert text.startswith("# Report: made\n")
    assert "](<charts/weights.svg>)" in text


def test_a_file_that_cannot_be_written(runs: list[Path]) -> None:
    Path("file").write_text("")
    for option, message in (
        ("--html", "file/x cannot be written"),
        ("--csv", "file/x cannot be written"),
        ("--figures", "no figures can be written to file/x"),
    ):
        failed = run(*runs, option, "file/x")
        assert failed.exit_code == 1
        assert message in failed.stderr
