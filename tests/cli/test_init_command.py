"""``knnper init``: a folder whose experiment runs as it is."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
import typer
from typer.testing import CliRunner

import knnper
from knnper.experiment import read_experiment
from knnper.simulation.batches.plan import read_comparison, read_sweep
from knnper.simulation.experiments import find_experiment, shipped_experiments
from knnper.simulation.workbench import experiment_catalogue
from knnper_cli.app import app


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(app, arguments)


def test_what_it_writes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    made = run("init", "mine")
    assert made.exit_code == 0, made.output
    assert {one.name for one in Path("mine").iterdir()} == {
        "experiment.yaml",
        "model.py",
        "README.md",
    }
    told = shlex.split(made.stderr.partition("Next: ")[2])
    assert told == ["knnper", "simulate", "mine/experiment.yaml"]
    done = run(*told[1:], "--set", "training.num_rounds=2")
    assert done.exit_code == 0, done.output
    finished = knnper.Run("runs/mine")
    assert set(finished.results["manifest"]["own_code"]) == {"model:Net"}
    assert "features.0.weight" in " ".join(finished.model().state_dict())


def test_its_readme_names_commands_that_exist(tmp_path: Path) -> None:
    run("init", str(tmp_path / "mine"))
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    text = (tmp_path / "mine/README.md").read_text()
    lines = [one for one in text.splitlines() if one.startswith("knnper ")]
    assert len(lines) == 4
    for line in lines:
        _, name, *arguments = shlex.split(line, comments=True)
        group.commands[name].make_context(name, arguments)


def test_what_is_shipped_is_listed_with_its_command() -> None:
    rows = json.loads(run("list", "experiments", "--json").stdout)
    read: dict[str, Callable[[Path], object]] = {
        "simulate": lambda path: read_experiment(path, experiment_catalogue()),
        "sweep": read_sweep,
        "compare": read_comparison,
    }
    for row in rows:
        _, command, name = row["command"].split()
        read[command](find_experiment(name))
        file = find_experiment(name).read_text(encoding="utf-8")
        assert file.startswith(f"# {row['about'][:40]}")
    assert len(rows) == len(shipped_experiments()) > 5
    shown = run("list", "experiments").stdout
    assert "knnper compare table2_digits" in shown


def test_what_is_there_stays(tmp_path: Path) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "model.py").write_text("mine")
    file.write_text("mine")
    for path in (taken, file):
        refused = run("init", str(path))
        assert refused.exit_code == 2
        assert "is not empty; choose a new folder" in refused.stderr
    assert (taken / "model.py").read_text() == file.read_text() == "mine"
    refused = run("init", str(tmp_path / "my experiment"))
    assert refused.exit_code == 2
    assert "the folder names the experiment" in " ".join(refused.stderr.split())
    assert not (tmp_path / "my experiment").exists()
