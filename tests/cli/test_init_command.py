"""``knnper init``: a folder whose experiment runs as it is."""

import json
import shlex
from pathlib import Path

import click.testing
import pytest
import typer
from typer.testing import CliRunner

import knnper
from knnper.cli.app import app
from knnper.errors import ConfigError
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.batches.sweep import read_sweep
from knnper.simulation.experiments import find_experiment, shipped_experiments
from knnper.yaml_text import read_yaml


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(app, arguments)


def test_experiment_that_init_writes_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    result = run("init", "mine")
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("mine").iterdir()} == {
        "experiment.yaml",
        "model.py",
        "README.md",
    }
    command = shlex.split(result.stderr.partition("Next: ")[2])
    assert command == ["knnper", "simulate", "mine/experiment.yaml"]
    done = run(*command[1:], "--set", "training.num_rounds=2")
    assert done.exit_code == 0, done.output
    finished = knnper.Run("runs/mine")
    assert set(finished.results["manifest"]["own_code"]) == {"model:Net"}
    assert "features.0.weight" in " ".join(finished.model().state_dict())


def test_a_comparison_that_it_writes_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("init", "mine", "--compare")
    assert {path.name for path in Path("mine").iterdir()} == {
        "comparison.yaml",
        "model.py",
        "README.md",
    }
    command = shlex.split(result.stderr.partition("Next: ")[2])
    assert command == ["knnper", "compare", "mine/comparison.yaml"]
    comparison = read_comparison(find_experiment("mine"))
    assert comparison.name == "mine"
    assert [*comparison.variants] == ["fedavg", "fine_tuned", "knn_per", "fedprox"]
    assert all(experiment.own() for experiment in comparison.experiments)


@pytest.mark.parametrize(
    ("command", "kind", "advice"),
    [
        ("simulate", "sweep", "knnper sweep"),
        ("simulate", "comparison", "knnper compare"),
        ("partition", "sweep", "knnper sweep"),
        ("sweep", "experiment", "experiment: FILE, with what to vary"),
        ("sweep", "comparison", "knnper compare"),
        ("compare", "experiment", "knnper init FOLDER --compare"),
        ("compare", "sweep", "knnper sweep"),
    ],
)
def test_a_file_of_another_kind_is_recognised(
    tmp_path: Path, command: str, kind: str, advice: str
) -> None:
    run("init", str(tmp_path / "a"))
    run("init", str(tmp_path / "b"), "--compare")
    (tmp_path / "sweep.yaml").write_text(
        "name: s\nexperiment: a/experiment.yaml\ngrid: {training.num_rounds: [1, 2]}\n"
    )
    files = {"experiment": "a/experiment.yaml", "comparison": "b/comparison.yaml"}
    path = tmp_path / files.get(kind, "sweep.yaml")
    refused = run(command, str(path))
    assert refused.exit_code == 2
    expected = "comparison" if command == "compare" else command
    expected = "experiment" if command in ("simulate", "partition") else expected
    assert f"{kind}, which is no {expected}" in refused.stderr
    assert advice in refused.stderr
    assert refused.stderr.count("\n") == 2  # one problem, not one a key


def test_reference_to_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    run("init", str(tmp_path / "b"), "--compare")
    grid = "name: s\ngrid: {training.num_rounds: [1]}\n"
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{grid}experiment: b/comparison.yaml\n")
    with pytest.raises(ConfigError, match="comparison, which is no experiment"):
        read_sweep(path)
    path.write_text(grid)
    other = tmp_path / "other.yaml"
    other.write_text("name: s\nextends: sweep.yaml\n")
    with pytest.raises(ConfigError, match="sweep, which is no comparison"):
        read_comparison(other)


def test_its_readme_names_commands_that_exist(tmp_path: Path) -> None:
    run("init", str(tmp_path / "mine"))
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    text = (tmp_path / "mine/README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("knnper ")]
    assert len(lines) == 4
    for line in lines:
        _, name, *arguments = shlex.split(line, comments=True)
        group.commands[name].make_context(name, arguments)


def test_shipped_experiments_are_listed_with_their_commands() -> None:
    rows = json.loads(run("list", "experiments", "--json").stdout)
    # The files themselves are read by the tests of the pages.
    keys_of_command = {
        "simulate": {"data"},
        "sweep": {"grid", "variants", "random"},
        "compare": {"rows", "extends"},
    }
    for row in rows:
        _, command, name = row["command"].split()
        path = find_experiment(name)
        document = read_yaml(path)
        assert isinstance(document, dict)
        assert document.keys() & keys_of_command[command]
        file = path.read_text(encoding="utf-8")
        assert file.startswith(f"# {row['about'][:40]}")
    assert len(rows) == len(shipped_experiments()) > 5
    shown = run("list", "experiments").stdout
    assert "knnper compare table2_digits" in shown


def test_init_refuses_an_existing_place(tmp_path: Path) -> None:
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
