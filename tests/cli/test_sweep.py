"""``knnper sweep``: the table it prints, what it leaves, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.experiment import dump_yaml
from knnper_cli.app import app
from tests.simulation.batches.small_sweep import NEIGHBORS, document, in_this_process

WHERE = "knnper.simulation.batches.runner.run_in_workers"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHERE, in_this_process)


def run(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(document(**changes)))
    command = ["sweep", str(path), *arguments]
    if "--output" not in arguments:
        command += ["--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, command)


def test_tables_and_a_plot_are_written(tmp_path: Path) -> None:
    wrong = run(tmp_path, x="lost")
    assert wrong.exit_code == 2
    assert "x: found 'lost', which is not varied" in wrong.stderr
    done = run(tmp_path, x=NEIGHBORS, group="all")
    assert done.exit_code == 0, done.output
    assert "95 % interval" in done.stdout
    # Two seeds: two rounds and two model distributions each.
    assert "4 runs, 0 of them there" in done.stderr
    assert "8/8 steps" in done.stderr
    folder = tmp_path / "out"
    names = ".lock .batch.json points.csv table.csv table.md plot.svg plot.pdf plot.png"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == set(names.split())
    assert (folder / "points.csv").read_text().count("\n") == 1 + 4
    assert (folder / "table.csv").read_text().count("\n") == 1 + 2

    again = run(tmp_path, "--json")
    assert "4 runs, 4 of them there" in again.stderr
    first, second = json.loads(again.stdout)
    assert first["values"] == {NEIGHBORS: 1}
    assert second["estimates"]["seen.accuracy_weighted"]["count"] == 2


def test_figures_of_all_clients_pool_the_groups(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", vary={}, seeds=[1])
    (point,) = json.loads(done.stdout)
    found = {name: one["mean"] for name, one in point["estimates"].items()}
    sizes = {group: found[f"{group}.num_test_examples"] for group in ("seen", "unseen")}
    right = sum(
        size * found[f"{group}.accuracy_weighted"] for group, size in sizes.items()
    )
    assert found["all.num_test_examples"] == sum(sizes.values()) > 0
    assert found["all.accuracy_weighted"] == pytest.approx(right / sum(sizes.values()))


def test_what_validation_data_chose_can_be_tested(tmp_path: Path) -> None:
    done = run(tmp_path, evaluate_on="validation", seeds=[1])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out/chosen.yaml"
    assert f"To test it, once: knnper sweep {path} --set 'seeds=[" in done.stderr
    assert "best on validation data: {" in done.stderr
    tested = ["sweep", str(path), "--output", str(tmp_path / "tested"), "--json"]
    (point,) = json.loads(CliRunner().invoke(app, tested).stdout)
    assert point["variant"] == "chosen"
    assert point["num_runs"] == 1


def test_what_diverges_is_named(tmp_path: Path) -> None:
    rates = {"training.learning_rate": [1e30, 0.1]}
    done = run(tmp_path, vary=rates, seeds=[1])
    assert done.exit_code == 0, done.output
    assert "alone {'training.learning_rate': 1e+30} failed with seed 1" in done.stderr
    (failed,) = (tmp_path / "out").rglob("failed.txt")
    assert f". To make it again, delete {failed.parent}\n" in done.stderr
    assert "0 (1 failed)" in (tmp_path / "out/table.md").read_text()


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WHERE, interrupted)
    monkeypatch.setattr("sys.argv", ["/bin/knnper", "sweep", "a b.yaml"])
    done = run(tmp_path)
    assert done.exit_code == 130
    assert "To go on: knnper sweep 'a b.yaml'" in done.stderr


def test_a_finished_run_is_not_trained_anew(tmp_path: Path) -> None:
    first = run(tmp_path, "--output", str(tmp_path / "first"))
    assert first.exit_code == 0, first.output
    with_state = [path.parent for path in tmp_path.glob("first/runs/*/checkpoints")]
    trained = [word for path in with_state for word in ("--trained", str(path))]
    assert len(trained) == 2 * 2  # a run of each seed
    again = run(tmp_path, *trained)
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
