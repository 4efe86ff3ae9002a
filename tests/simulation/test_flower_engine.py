"""The adapter to Flower's engine; its agreement with others is `test_parity`'s."""

import subprocess
from pathlib import Path

import pytest

from tests.simulation.knnper_process import KNNPER

EXPERIMENT = """
name: engine
data: {name: digits}
partition: {name: iid, num_clients: 3}
model: {name: tiny_cnn}
training: {num_rounds: 1}
method: {name: fedavg}
"""


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
