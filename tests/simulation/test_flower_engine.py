"""The adapter to Flower's engine; its agreement with others is `test_parity`'s."""

import os
import subprocess
from pathlib import Path

import pytest

from knnper.config.sections import RunSettings
from simulation.flower_engine import num_workers
from tests.simulation.knnper_process import KNNPER

EXPERIMENT = """
name: engine
data: {name: digits}
partition: {name: iid, num_clients: 3}
model: {name: tiny_cnn}
training: {num_rounds: 1}
method: {name: fedavg}
"""


def test_one_worker_a_core_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_workers(RunSettings(num_workers=7)) == 7
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
        assert num_workers(RunSettings()) == 3
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_workers(RunSettings()) == 5


@pytest.mark.slow
@pytest.mark.ray
def test_a_machine_that_is_too_small_is_an_error_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT)
    folder, asks = tmp_path / "run", "run.gpus_per_client=100"
    done = subprocess.run(
        [KNNPER, "simulate", path, "--set", asks, "--output", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "run.gpus_per_client" in done.stderr
    assert "Error: Flower's simulation failed" in done.stderr
