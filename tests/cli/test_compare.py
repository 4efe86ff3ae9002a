"""``knnper compare``: the table it prints, what it leaves, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.experiment import dump_yaml
from knnper.simulation.batches.progress import Progress, TimeLeft
from knnper_cli.app import app
from knnper_cli.terminal import line_counter, roughly, time_left
from tests.simulation.batches.small_sweep import in_this_process

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


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "knnper.simulation.batches.runner.run_in_workers"
    monkeypatch.setattr(where, in_this_process)


def run(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(COMPARISON | changes))
    command = ["compare", str(path), "--output", str(tmp_path / "out"), *arguments]
    return CliRunner().invoke(app, command)


def test_a_table_is_printed_and_written(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert "kNN-Per" in done.stdout
    assert "2 runs, 0 of them there" in done.stderr
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

    again = run(tmp_path, "--json")
    first, second = json.loads(again.stdout)
    assert (first["title"], second["title"]) == ("FedAvg", "kNN-Per")
    assert second["seen"]["average"]["std"] is None


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, reference="lost")
    assert done.exit_code == 2
    assert "expected the name of a row: mean, memory" in done.stderr
    assert "\n  - rows: found" in run(tmp_path, rows=[]).stderr


def test_runs_of_older_code_are_named(tmp_path: Path) -> None:
    run(tmp_path)
    for path in (tmp_path / "out").rglob("code.txt"):
        path.write_text("older")
    assert "2 of the runs in" in run(tmp_path).stderr


class TestTimeLeft:
    """What is said of how far a batch is, and of the time that is left."""

    @pytest.mark.parametrize(
        ("seconds", "expected"),
        [
            (4, "10 s"),
            (26, "30 s"),
            (56, "1 min 00 s"),
            (144, "2 min 20 s"),
            (599, "10 min"),
            (1944, "32 min"),
        ],
    )
    def test_no_more_digits_than_are_known(self, seconds: float, expected: str) -> None:
        assert roughly(seconds) == expected

    def test_what_is_not_known_is_not_said(self) -> None:
        assert time_left(Progress(1, 3, 0, None)) == ""
        assert time_left(Progress(3, 3, 0, TimeLeft(0.0))) == ""
        assert time_left(Progress(1, 3, 0, TimeLeft(20.0))) == "some 20 s left"
        least = TimeLeft(20.0, is_least=True)
        assert time_left(Progress(1, 3, 0, least)) == "at least 20 s left"

    def test_lines_now_and_then(self) -> None:
        now, lines = [0.0], list[str]()
        advance = line_counter(3, lines.append, lambda: now[0])
        looks = ((0, 0), (4, 1), (5, 1), (6, 2), (30, 2), (89, 2), (90, 2), (100, 3))
        for moment, done in looks:
            now[0] = moment
            advance(Progress(done, 3, 0, TimeLeft(100.0 - moment)))
        assert lines == [
            "3 runs",
            "1/3 runs some 1 min 40 s left",
            "2/3 runs some 1 min 10 s left",
            # Nothing new for a minute is told too.
            "2/3 runs some 10 s left",
            "3/3 runs",
        ]

    def test_what_is_found_is_said_at_once(self) -> None:
        lines = list[str]()
        advance = line_counter(20, lines.append, lambda: 0.0)
        advance(Progress(0, 20, 0, None))
        advance(Progress(8, 20, 8, TimeLeft(5.0)))
        assert lines == ["20 runs", "8/20 runs are there"]
