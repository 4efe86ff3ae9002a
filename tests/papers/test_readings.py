"""Readings after rounds are those of runs that end there."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.errors import ConfigError
from knnper.experiment_file import to_document
from knnper.files import JsonLines
from knnper.server.observer import RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.comparison import (
    Comparison,
    read_comparison,
)
from knnper.simulation.interface import simulate
from papers import rounds
from papers.__main__ import app
from papers.rounds import BothReadings, Reading, read_rounds, readings_in
from tests.papers.small_files import COMPARISON, write

pytestmark = pytest.mark.integration

ROWS = {
    "fedavg": {"method": {"name": "fedavg"}},
    "ditto": {"method": {"name": "ditto", "prox_weights": [0.1]}},
}


def plan_in(folder: Path, *overrides: str, **changes: Any) -> Comparison:
    changes = {
        "rows": ROWS,
        "reference": "fedavg",
        "each_also_with": {"name": "knn"},
    } | changes
    path = write(folder, COMPARISON, **changes)
    small = "partition.used_fraction=0.2", "training.num_rounds=3"
    return read_comparison(path, [*small, *overrides])


def test_a_reading_is_that_of_a_run_that_ends_after_the_round(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    made: list[RoundRecord] = []
    read_rounds(plan, tmp_path / "all", 2, (), made.append)
    assert len(made) == 2 * 3  # rows with a memory train nothing
    lines = [
        one
        for name in ("fedavg", "ditto")
        for one in JsonLines(tmp_path / f"all/{name}-seed-1" / rounds.READINGS).read()
    ]
    # The last round counts, whatever it is a multiple of.
    assert {(one["row"], one["server_round"]) for one in lines} == {
        (row, number)
        for row in ("fedavg", "ditto", "fedavg-knn", "ditto-knn")
        for number in (2, 3)
    }
    for row in ("ditto-knn", "fedavg"):
        (experiment,) = plan.variants[row][0].runs.values()
        run = simulate(
            to_document(experiment),
            output=tmp_path / row,
            progress=False,
            training__num_rounds=2,
            run__validate_every=2,
        )
        (found,) = (
            one for one in lines if (one["row"], one["server_round"]) == (row, 2)
        )
        assert found["test"] == run.results["seen"]["accuracy_weighted"]
        validation = run.rounds["validation_accuracy_personal"].iloc[-1]
        assert found["validation"] == validation


def test_what_was_left_goes_on(tmp_path: Path) -> None:
    plan, output = plan_in(tmp_path), tmp_path / "all"
    read_rounds(plan, tmp_path / "whole", 1, ["ditto"], lambda _: None)

    def stop(figures: RoundRecord) -> None:
        if figures["server_round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_rounds(plan, output, 1, ["ditto"], stop)
    assert [one.last["server_round"] for one in readings_in(plan, output)["ditto"]] == [
        2
    ]
    made: list[int] = []
    read_rounds(
        plan, output, 1, ["ditto"], lambda one: made.append(one["server_round"])
    )
    assert made == [3]
    assert readings_in(plan, output) == readings_in(plan, tmp_path / "whole")
    assert readings_in(plan, output).keys() == {"ditto", "ditto-knn"}
    assert len(RunFolder(output / "ditto-seed-1").rounds()) == 3
    # All is there: nothing is made again.
    read_rounds(plan, output, 1, ["ditto"], lambda _: pytest.fail("a round"))


def reading(number: int, validation: float | None, test: float) -> Reading:
    return {"server_round": number, "validation": validation, "test": test}


def test_both_readings() -> None:
    one, two, three = (
        reading(1, 0.5, 0.2),
        reading(2, 0.6, 0.3),
        reading(3, 0.6, 0.4),
    )
    both = BothReadings.of([one, two, three])
    assert both == BothReadings(last=three, chosen=two, best=three)
    none = [reading(1, None, 0.4), reading(2, None, 0.4)]
    assert BothReadings.of(none) == BothReadings(none[1], none[0], none[0])
    assert rounds.cell([two, three]) == "35.00 (2, 3)"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, grid={"training.learning_rate": [0.1, 0.2]})
    with pytest.raises(ConfigError) as raised:
        read_rounds(plan, tmp_path, 1, ["fedavgg"], lambda _: None)
    told = str(raised.value)
    assert "rows.ditto: found 2 settings to choose from, expected 1" in told
    assert "unknown name 'fedavgg'; did you mean 'fedavg'?" in told


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, COMPARISON)
    command = [
        "rounds",
        str(path),
        "--output",
        str(tmp_path / "all"),
        "--only",
        "memory",
    ]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "chosen on validation" in shown.output
    assert "kNN-Per" in shown.output
    assert (tmp_path / "all/readings.csv").read_text().startswith("row,server_round,")
