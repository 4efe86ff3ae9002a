"""Accuracy against virtual hours."""

from pathlib import Path

import pandas as pd
import pytest

from knnper.errors import RunError
from papers.hours import TimedRun, groups_of, time_table, write_hours
from tests.simulation.batches.small_comparison import plan

pytestmark = pytest.mark.integration


def client(number: int, seconds: float | None, rounds: int) -> dict[str, object]:
    late = float(number) if rounds else None
    accuracy = number / 10
    return {
        "client": f"{number}",
        "seen": seconds is not None,
        "num_test": number + 1,
        "accuracy": accuracy,
        "accuracy_global": accuracy / 2,
        "num_rounds": rounds if seconds is not None else None,
        "round_seconds": seconds,
        "staleness": late if seconds is not None else None,
    }


ROUNDS = [
    {"virtual_seconds": hours * 3600.0, "validation_accuracy": found, **more}
    for hours, found, more in (
        (1, 0.5, {"staleness": 0.0, "staleness_max": 0, "num_late": 2}),
        (2, None, {"staleness": 1.0, "staleness_max": 2, "num_late": 0}),
        (3, 0.75, {"staleness": 2.0, "staleness_max": 4, "num_late": 1}),
    )
]


def test_hours_by_hand() -> None:
    run = TimedRun(ROUNDS, pd.DataFrame())
    assert run.curve == [(1.0, 0.5), (3.0, 0.75)]
    assert [run.hours_to(one) for one in (0.5, 0.6, 0.8)] == [1.0, 3.0, None]
    table = time_table({"a": [run]}, (0.6, 0.8)).as_markdown()
    assert "hours to 60 % | hours to 80 % | hours in all" in table
    cells = [one.strip() for one in table.splitlines()[2].split("|")[1:-1]]
    assert cells == ["a", "3.00", "-", "3.00", "1.00", "4", "1.0"]


def test_fifths_from_the_fastest_by_hand() -> None:
    """The slowest first in the file; one took part in nothing, one is unseen."""
    clients = [client(number, 10.0 - number, number % 3) for number in range(10)]
    groups = groups_of(
        "a", [TimedRun(ROUNDS, pd.DataFrame([*clients, client(10, None, 0)]))]
    )
    assert [one.number for one in groups] == [1, 2, 3, 4, 5]
    fastest = groups[0]  # 9 and 8
    assert (fastest.rounds.mean, fastest.staleness.mean) == (1.0, 8.0)
    weighted = (0.9 * 10 + 0.8 * 9) / 19
    assert fastest.personal.mean == pytest.approx(weighted)
    assert fastest.of_global.mean == pytest.approx(weighted / 2)


def test_the_hours_of_a_comparison(tmp_path: Path) -> None:
    buffered = {
        "method": {"name": "fedavg"},
        "training": {"timing": {"name": "buffered", "buffer_size": 2}},
        "title": "FedBuff",
    }
    rows = {"mean": {"method": {"name": "fedavg"}}, "buffered": buffered}
    slow = (
        *("training.devices={speed_spread: 10}", "run.validate_every=1"),
        "training.learning_rate=0.1",
    )
    comparison = plan(tmp_path, *slow, grid={}, rows=rows, seeds=[1])
    tables = write_hours(comparison, tmp_path / "runs", tmp_path / "out", [0.0])
    assert [
        line.split("|")[1].strip() for line in tables[0].as_markdown().splitlines()
    ][2:] == ["FedAvg", "FedBuff"]
    assert len(tables[1].as_markdown().splitlines()) == 2 + 2 * 4
    assert (tmp_path / "out/hours.svg").is_file()
    assert (tmp_path / "out/hours.md").read_text().count("\n\n") == 1
    for given, problem in (
        (slow[1:], r"without virtual time, expected training\.devices"),
        (slow[:1], r"without accuracies on validation data, expected run\.validate_e"),
    ):
        with pytest.raises(RunError, match=problem):
            write_hours(
                plan(tmp_path, *given, grid={}), tmp_path / "plain", tmp_path, None
            )
    assert not (tmp_path / "plain").exists()
