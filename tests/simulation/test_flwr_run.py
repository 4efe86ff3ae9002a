"""``flwr run .`` does the job of ``knnper simulate``, here and in an own folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.simulation.knnper_process import simulate

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "simulation/experiments/demo.yaml"
SETTINGS = "training.num_rounds=4;partition.num_clients=20"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Flower with a home and a local SuperLink of its own, which ends with the test."""
    port = free_port()
    scripts = str(Path(sys.executable).parent)
    yield os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(port).encode() in words:
            os.kill(int(path.parent.name), signal.SIGTERM)


def wait_for(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.2)


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
    tmp_path: Path, environment: dict[str, str], is_own: bool, nodes: int
) -> None:
    app = app_of_ones_own(tmp_path / "app") if is_own else REPOSITORY
    folder = tmp_path / "flwr-run"
    settings = f'output="{folder}" set="{SETTINGS}"'
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", ".", "--stream", "--run-config", settings]
    done = subprocess.run(
        [*command, "--federation-config", federation],
        cwd=app,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(folder / "results.json", timeout_s=60)
    expected = tmp_path / "knnper"
    changes = [part for one in SETTINGS.split(";") for part in ("--set", one)]
    simulate(DEMO, *changes, "--engine", "serial", "--output", expected)
    same = (folder / "clients.csv").read_bytes() == (
        expected / "clients.csv"
    ).read_bytes()
    assert same
    found = json.loads((folder / "results.json").read_text())
    wanted = json.loads((expected / "results.json").read_text())
    assert found["seen"] == wanted["seen"]
    assert found["unseen"] == wanted["unseen"]
