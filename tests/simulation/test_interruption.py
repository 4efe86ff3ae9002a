"""How a run ends that does not end by itself."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.simulation.knnper_process import (
    descendants,
    simulate,
    start,
    wait_for_rounds,
)

EXPERIMENT = """
name: interrupted
data: {name: digits}
partition: {name: iid, num_clients: 10}
model: {name: tiny_cnn, embedding_dim: 16}
training: {num_rounds: 120, batch_size: 16}
method: {name: fedavg}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["serial", pytest.param("flower", marks=pytest.mark.ray)]
)
def test_ctrl_c_leaves_a_run(experiment: Path, tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "run"
    process = start(folder, experiment, "--engine", engine)
    wait_for_rounds(process, folder, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"knnper simulate --resume {folder}" in errors
    assert "Traceback" not in errors
    assert not (folder / "results.json").exists()
    simulate("--resume", folder, "--engine", "serial")
    results = json.loads((folder / "results.json").read_text())
    assert results["training"]["num_rounds"] == 120


@pytest.mark.slow
@pytest.mark.ray
def test_a_dead_worker_ends_the_run(experiment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, experiment, "--workers", "2")
    wait_for_rounds(process, folder, 3)
    workers = [pid for pid, name in descendants(process.pid) if "ClientApp" in name]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a worker process died" in errors
    assert f"knnper simulate --resume {folder}" in errors
