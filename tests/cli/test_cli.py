import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

import knnper
import knnper.simulation.engines
from knnper.cli.app import app
from knnper.errors import RunError
from knnper.server.run_folder import RunFolder
from knnper.simulation.origin import CODE, is_of_this_code
from knnper.simulation.workbench import Workbench
from knnper.strategies.catalogue import METHODS, PERSONALIZERS

DOCUMENT: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 4, "unseen_fraction": 0.25},
    "model": {"name": "tiny_cnn"},
    "training": {"num_rounds": 2},
    "method": {"name": "knn_per"},
    "run": {"engine": "serial"},
}
FIGURES = {"num_clients": 3, "accuracy_bottom_decile": 0.25, "fraction_degraded": 0.5}
GROUP = {
    **FIGURES,
    "accuracy_weighted": 0.75,
    "global": {**FIGURES, "accuracy_weighted": 0.5},
}
RESULTS = {
    "method": "knn_per",
    "seen": GROUP,
    "unseen": GROUP,
    "training": {"num_rounds": 2, "seconds": 1.0},
    "manifest": {},
}


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an experiment's file in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    path = Path("tiny.yaml")
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(exit_code: int, message: str, *arguments: object) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def pretend(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None
) -> list[Any]:
    """Replace the run itself by its outcome; return what it was called with."""
    calls: list[Any] = []

    def simulate(bench: Workbench, folder: RunFolder, *_: Any) -> dict[str, Any]:
        calls.append((bench.experiment, folder))
        if outcome is not None:
            raise outcome
        folder.write_results(RESULTS)
        return RESULTS

    monkeypatch.setattr(knnper.simulation.engines, "simulate", simulate)
    return calls


def test_help_is_quick() -> None:
    code = (
        "import sys, knnper.cli.app;"
        "assert not {'torch', 'flwr', 'ray', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    result = run("--help")
    assert result.exit_code == 0
    for command in ("simulate", "report", "partition", "list", "fed", "site"):
        assert command in result.stdout


def test_version_and_lists() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"knnper {knnper.__version__}\n")
    listed = json.loads(run("list", "methods", "--json").stdout)
    assert [entry["name"] for entry in listed["methods"]] == list(METHODS)
    on_top = {entry["name"]: entry for entry in listed["personalizations"]}
    assert on_top.keys() == PERSONALIZERS.keys()
    assert "knn_weights" in on_top["knn"]["settings"]
    assert "kNN-Per" in run("list", "methods").stdout
    entries = json.loads(run("list", "data", "--json").stdout)
    assert {"digits", "cifar10"} <= {entry["name"] for entry in entries}
    assert "handwritten digits" in run("list", "data").stdout


def test_partition(experiment: Path) -> None:
    result = run("partition", experiment, "--json", "--plot", "picture.png")
    document = json.loads(result.stdout)
    assert (document["num_seen"], document["num_unseen"]) == (3, 1)
    assert abs(document["label_information"]) < 0.05  # iid
    client = document["clients"][0]
    num_known = client["num_train"] + client["num_validation"]
    assert sum(client["class_counts"]) == num_known
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")
    table = run("partition", experiment, "--set", "run.seed=1").stdout
    assert table.count("unseen") == 2  # one row, one total
    assert document["sha256"] not in table


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ("partition tiny.yaml --plot picture.txt", 2, ".png, .pdf, .svg"),
        (
            "simulate tiny.yaml --set training.num_round=3",
            2,
            "Error: 1 problem in tiny.yaml with training.num_round=3: "
            "- training.num_round: unknown setting; did you mean 'num_rounds'?",
        ),
        ("simulate", 2, "give either"),
        ("simulate tiny.yaml --resume runs/x", 2, "give either"),
        ("simulate --resume runs/x --overwrite", 2, "goes with neither"),
        ("simulate tiny.yaml --from-round 3", 2, "goes with --resume"),
        ("simulate missing.yaml", 2, "there is no such file"),
        ("simulate tiny.yaml --continue-from runs/x", 2, "goes with neither"),
        ("simulate --continue-from a --resume b --output c", 2, "goes with neither"),
        ("simulate --continue-from runs/x", 2, "needs --output, a new folder"),
        ("simulate --continue-from runs/x --output runs/y", 1, "holds no run"),
    ],
)
@pytest.mark.usefixtures("experiment")
def test_wrong_usage(arguments: str, exit_code: int, message: str) -> None:
    refused(exit_code, message, *arguments.split())
    assert not Path("runs").exists()


def test_simulate(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, None)
    result = run("simulate", experiment, "--workers", 3, "--engine", "flower")
    assert result.exit_code == 0, result.stderr
    settings, folder = calls[0]
    assert (settings.run.num_workers, settings.run.engine) == (3, "flower")
    assert folder.path == Path("runs/tiny")
    assert result.stdout.startswith("kNN-Per is right for ")
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["FedAvg", "kNN-Per"] * 2
    assert "runs/tiny" in result.stderr
    refused(2, "--overwrite", "simulate", experiment)
    again = run("simulate", experiment, "--json", "--output", "elsewhere")
    assert json.loads(again.stdout) == RESULTS
    assert Path("elsewhere/experiment.yaml").exists()


def test_simulate_notes_the_code_that_begins_a_run(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(monkeypatch, None)
    run("simulate", experiment)
    (_, folder) = calls[0]
    assert is_of_this_code(folder.path)
    (folder.path / CODE).write_text("older")
    run("simulate", "--resume", folder.path)
    assert not is_of_this_code(folder.path)
    run("simulate", experiment, "--overwrite")
    assert is_of_this_code(folder.path)


def test_an_interrupted_run_says_how_to_go_on(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, KeyboardInterrupt())
    refused(
        130,
        "To begin again: knnper simulate --resume runs/tiny",
        "simulate",
        experiment,
    )
    calls = pretend(monkeypatch, None)
    result = run("simulate", "--resume", "runs/tiny", "--workers", 2)
    assert result.exit_code == 0, result.stderr
    assert calls[0][0].run.num_workers == 2
    resume = ("simulate", "--resume", "runs/tiny")
    refused(2, "makes it another experiment", *resume, "--set", "run.seed=9")


def test_a_failed_run(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, RunError("round 3: all clients failed"))
    refused(1, "Error: round 3: all clients failed", "simulate", experiment)
    pretend(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    refused(1, "free space", "simulate", experiment, "--overwrite")
    refused(1, "To begin again: knnper", "simulate", experiment, "--overwrite")
    for number in (2, 4, 5):
        Path(f"runs/tiny/checkpoints/round-{number}").mkdir(parents=True)
    resume = ("simulate", "--resume", "runs/tiny")
    refused(1, "last checkpoint, of round 5: knnper simulate --resume", *resume)
    refused(1, "--from-round N from round 2 or 4", *resume)
    refused(1, "(2, 4, 5), found 3", *resume, "--from-round", "3")


@pytest.mark.integration
def test_a_run_goes_back_to_an_older_round(experiment: Path) -> None:
    serial = ("--engine", "serial", "--set", "training.num_rounds=3", "--json")
    first = run("simulate", experiment, *serial)
    assert first.exit_code == 0, first.stderr
    back = ("--resume", "runs/tiny", "--from-round", "1", "--json")
    again = run("simulate", *back)
    assert again.exit_code == 0, again.stderr
    assert "training: rounds 2 to 3" in again.stderr
    digests = [json.loads(done.stdout)["training"] for done in (first, again)]
    assert digests[0]["state_sha256"] == digests[1]["state_sha256"]


def test_a_run_that_could_not_start_leaves_no_folder_and_deletes_none(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None)
    data = "data={name: image_folder, root: missing}"
    refused(1, "missing", "simulate", experiment, "--set", data)
    assert not Path("runs/tiny").exists()
    assert run("simulate", experiment).exit_code == 0
    refused(1, "missing", "simulate", experiment, "--overwrite", "--set", data)
    assert Path("runs/tiny/results.json").exists()
