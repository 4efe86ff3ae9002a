"""``flwr run .`` does the job of ``knnper simulate``, here and in an own folder."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.processes import BIN, BIN_IN_PATH, Commands, free_ports, wait_until
from tests.simulation.knnper_process import simulate

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "simulation/experiments/demo.yaml"
SETTINGS = "training.num_rounds=4;partition.num_clients=20"


def listing(language: str) -> str:
    """Return the one listing of docs/flower.md in a language."""
    page = (REPOSITORY / "docs/flower.md").read_text(encoding="utf-8")
    fenced = rf"^```{language}\n(.*?)^```$"
    (text,) = re.findall(fenced, page, re.MULTILINE | re.DOTALL)
    return str(text)


def app_of_ones_own(folder: Path) -> Path:
    """Make the folder of docs/flower.md, which has nothing of the repository."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(listing("toml"))
    shutil.copy(DEMO, folder / "experiment.yaml")
    return folder


def flower_of_its_own(home: Path) -> dict[str, str]:
    """Return what gives Flower a local SuperLink that ends with the test."""
    http_port, control_port = free_ports(2)
    return {
        "PATH": BIN_IN_PATH,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ADDRESS": "local",
    }


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("is_own", "nodes"), [(False, 20), (True, 2)])
def test_flwr_run_ends_the_same(
    tmp_path: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    is_own: bool,
    nodes: int,
) -> None:
    monkeypatch.chdir(app_of_ones_own(tmp_path / "app") if is_own else REPOSITORY)
    folder, expected = tmp_path / "flwr-run", tmp_path / "knnper"
    environment = flower_of_its_own(tmp_path / "flwr")
    settings = f'output="{folder}" set="{SETTINGS}"'
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    words = ("run", ".", "--stream", "--run-config", settings)
    command: list[str | Path] = [
        BIN / "flwr",
        *words,
        "--federation-config",
        federation,
    ]
    run = commands.start("run", command, environment)
    assert run.wait(240) == 0, run.written
    wait_until((folder / "results.json").exists, "the results", 60)
    changes = [part for change in SETTINGS.split(";") for part in ("--set", change)]
    simulate(DEMO, *changes, "--engine", "serial", "--output", expected)
    run_outcome, cli_outcome = (
        json.loads((path / "results.json").read_text()) for path in (folder, expected)
    )
    assert (run_outcome["seen"], run_outcome["unseen"]) == (
        cli_outcome["seen"],
        cli_outcome["unseen"],
    )
    tables = [(path / "clients.csv").read_bytes() for path in (folder, expected)]
    assert tables[0] == tables[1]


@pytest.mark.slow
@pytest.mark.ray
def test_a_plain_flower_app_gives_its_clients_a_memory(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _, _ = listing("toml").partition("[tool.flwr.app.config]")
    for side in ("server", "client"):
        app = f"knnper.cli.flower_apps:{side}_app"
        assert app in project
        project = project.replace(app, f"app:{side}")
    (tmp_path / "app").mkdir()
    (tmp_path / "app/pyproject.toml").write_text(project)
    (tmp_path / "app/app.py").write_text(listing("python"))
    monkeypatch.chdir(tmp_path / "app")
    federation = "num-supernodes=10 client-resources-num-cpus=1"
    command: list[str | Path] = [BIN / "flwr", "run", ".", "--stream"]
    command += ["--federation-config", federation]
    run = commands.start("run", command, flower_of_its_own(tmp_path / "flwr"))
    assert run.wait(240) == 0, run.written
    metrics = re.findall(r"\{'accuracy': 0[^}]*\}", run.written)
    metrics_found = ast.literal_eval(metrics[-1])
    assert metrics_found["accuracy"] > metrics_found["accuracy-global"] + 0.1
    assert metrics_found["knn-weight"] > 0
