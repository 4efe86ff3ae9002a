"""``flwr run .`` does the job of ``knnper simulate``, here and in an own folder."""

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


def app_of_ones_own(folder: Path) -> Path:
    """Make the folder of docs/flower.md, which has nothing of the repository."""
    folder.mkdir()
    page = (REPOSITORY / "docs/flower.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "pyproject.toml").write_text(listing)
    shutil.copy(DEMO, folder / "experiment.yaml")
    return folder


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
    http_port, control_port = free_ports(2)
    # Flower with a home and a local SuperLink of its own, which ends with the test.
    environment = {
        "PATH": BIN_IN_PATH,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
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
    changes = [part for one in SETTINGS.split(";") for part in ("--set", one)]
    simulate(DEMO, *changes, "--engine", "serial", "--output", expected)
    found, wanted = (
        json.loads((path / "results.json").read_text()) for path in (folder, expected)
    )
    assert (found["seen"], found["unseen"]) == (wanted["seen"], wanted["unseen"])
    tables = [(path / "clients.csv").read_bytes() for path in (folder, expected)]
    assert tables[0] == tables[1]
