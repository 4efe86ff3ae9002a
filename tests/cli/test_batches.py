"""``compare``, ``sweep`` and ``report``: what they print, leave and refuse."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.cli.counters import line_counter, roughly, time_left
from knnper.simulation.batches.progress import Progress
from knnper.yaml_text import dump_yaml
from tests.simulation.batches.small_sweep import NEIGHBORS, document, in_this_process
from tests.simulation.reporting.made_runs import made_run

COMPARISON: dict[str, Any] = {
    "name": "small",
    "reference": "mean",
    "seeds": [1],
    "base": {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tiny_cnn", "embedding_dim": 4},
        "training": {"num_rounds": 1, "batch_size": 64},
    },
    "rows": {
        "mean": {"method": {"name": "fedavg"}},
        "memory": {"method": {"name": "knn_per"}},
    },
}

WHERE = "knnper.simulation.batches.runner.run_in_workers"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHERE, in_this_process)


def compare(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(COMPARISON | changes))
    command = ["compare", str(path), "--output", str(tmp_path / "out"), *arguments]
    return CliRunner().invoke(app, command)


def test_a_table_is_printed_and_written(tmp_path: Path) -> None:
    done = compare(tmp_path)
    assert done.exit_code == 0, done.output
    assert "kNN-Per" in done.stdout
    assert "2 runs, 0 of them done already" in done.stderr
    # One training of one round for both.
    assert "3/3 steps" in done.stderr
    markdown = (tmp_path / "out/table.md").read_text()
    assert [line.split("|")[1].strip() for line in markdown.splitlines()] == [
        "method",
        "-------",
        "FedAvg",
        "kNN-Per",
    ]
    assert (tmp_path / "out/table.csv").read_text().count("\n") == 3

    again = compare(tmp_path, "--json")
    first, second = json.loads(again.stdout)
    assert (first["title"], second["title"]) == ("FedAvg", "kNN-Per")
    assert second["seen"]["average"]["std"] is None


def test_no_more_is_said_of_the_time_that_is_left_than_is_known() -> None:
    said = {seconds: roughly(seconds) for seconds in (4, 56, 144, 1944)}
    assert said == {4: "10 s", 56: "1 min 00 s", 144: "2 min 20 s", 1944: "32 min"}
    assert time_left(Progress(1, 3, 0, None)) == ""
    assert time_left(Progress(3, 3, 0, 0.0)) == ""
    assert time_left(Progress(1, 3, 0, 20.0)) == "some 20 s left"


def test_lines_now_and_then() -> None:
    now, lines = [0.0], list[str]()
    advance = line_counter(3, lines.append, lambda: now[0])
    looks = ((0, 0), (4, 1), (5, 1), (6, 2), (30, 2), (89, 2), (90, 2), (100, 3))
    for moment, done in looks:
        now[0] = moment
        advance(Progress(done, 3, 0, 100.0 - moment))
    assert lines == [
        "3 runs",
        "1/3 runs some 1 min 40 s left",
        "2/3 runs some 1 min 10 s left",
        # Nothing new for a minute is told too.
        "2/3 runs some 10 s left",
        "3/3 runs",
    ]


def sweep(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(document(**changes)))
    command = ["sweep", str(path), *arguments]
    if "--output" not in arguments:
        command += ["--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, command)


@pytest.mark.integration
def test_tables_and_a_plot_are_written(tmp_path: Path) -> None:
    wrong = sweep(tmp_path, x="lost")
    assert wrong.exit_code == 2
    assert "x: found 'lost', which is not varied" in wrong.stderr
    done = sweep(tmp_path, x=NEIGHBORS, group="all")
    assert done.exit_code == 0, done.output
    assert "95 % interval" in done.stdout
    # Two seeds: two rounds and two model distributions each.
    assert "4 runs, 0 of them done already" in done.stderr
    assert "8/8 steps" in done.stderr
    folder = tmp_path / "out"
    names = ".lock .batch.json points.csv table.csv table.md plot.svg plot.pdf plot.png"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == set(names.split())
    assert (folder / "points.csv").read_text().count("\n") == 1 + 4
    assert (folder / "table.csv").read_text().count("\n") == 1 + 2

    again = sweep(tmp_path, "--json")
    assert "4 runs, 4 of them done already" in again.stderr
    first, second = json.loads(again.stdout)
    assert first["values"] == {NEIGHBORS: 1}
    assert second["estimates"]["seen.accuracy_weighted"]["count"] == 2


def test_figures_of_all_clients_pool_the_groups(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--json", grid={}, seeds=[1])
    (point,) = json.loads(done.stdout)
    found = {name: one["mean"] for name, one in point["estimates"].items()}
    sizes = {group: found[f"{group}.num_test_examples"] for group in ("seen", "unseen")}
    right = sum(
        size * found[f"{group}.accuracy_weighted"] for group, size in sizes.items()
    )
    assert found["all.num_test_examples"] == sum(sizes.values()) > 0
    assert found["all.accuracy_weighted"] == pytest.approx(right / sum(sizes.values()))


def test_point_chosen_on_validation_data_can_be_tested(tmp_path: Path) -> None:
    done = sweep(tmp_path, evaluate_on="validation", seeds=[1])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out/chosen.yaml"
    assert f"To test it, once: knnper sweep {path} --set 'seeds=[" in done.stderr
    assert "best on validation data: {" in done.stderr
    tested = ["sweep", str(path), "--output", str(tmp_path / "tested"), "--json"]
    (point,) = json.loads(CliRunner().invoke(app, tested).stdout)
    assert point["variant"] == "chosen"
    assert point["num_runs"] == 1


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WHERE, interrupted)
    monkeypatch.setattr("sys.argv", ["/bin/knnper", "sweep", "a b.yaml"])
    done = sweep(tmp_path)
    assert done.exit_code == 130
    assert "To continue: knnper sweep 'a b.yaml'" in done.stderr


def test_a_finished_run_is_not_trained_anew(tmp_path: Path) -> None:
    first = sweep(tmp_path, "--output", str(tmp_path / "first"), seeds=[1])
    assert first.exit_code == 0, first.output
    with_state = [path.parent for path in tmp_path.glob("first/runs/*/checkpoints")]
    trained = [word for path in with_state for word in ("--trained", str(path))]
    assert len(trained) == 2
    again = sweep(tmp_path, *trained, seeds=[1])
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two seeds of one setup, in a working folder of their own."""
    monkeypatch.chdir(tmp_path)
    return [made_run(Path("runs") / f"seed{seed}", seed=seed) for seed in (0, 1)]


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.integration
def test_all_files(runs: list[Path]) -> None:
    files = ("--html", "out/report.html", "--csv", "table.csv", "--figures", "charts")
    made = report(*runs, *files, "--markdown")
    assert made.exit_code == 0
    assert made.stdout.startswith("# Report: made\n")
    assert "±" in made.stdout
    assert "](<charts/weights.svg>)" in made.stdout
    assert "The report is in out/report.html" in made.stderr
    assert Path("out/report.html").read_text().startswith("<!DOCTYPE html>")
    with Path("table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["label"] for row in table] == ["FedAvg", "kNN-Per"] * 2
    assert Path("charts/weights.pdf").is_file()


@pytest.mark.integration
def test_a_file_that_cannot_be_written(runs: list[Path]) -> None:
    Path("file").write_text("")
    for option, message in (
        ("--csv", "file/x cannot be written"),
        ("--figures", "figures cannot be written to file/x"),
    ):
        failed = report(*runs, option, "file/x")
        assert failed.exit_code == 1
        assert message in failed.stderr
