"""The same bits with secure aggregation on both engines, without and with Ray."""

from pathlib import Path

import pytest

from tests.processes import KNNPER, Commands
from tests.simulation.knnper_process import outcome

EXPERIMENT = """
name: secure
data: {name: digits}
partition: {name: dirichlet, num_clients: 8, alpha: 0.3, unseen_fraction: 0.25}
model: {name: tiny_cnn, embedding_dim: 64}  # large enough to travel as a file
training:
  num_rounds: 3
  batch_size: 8
  learning_rate: 0.05
  secure_aggregation: {name: PROTOCOL}
method: {name: knn_per}
run: {seed: 1}
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("protocol", ["secagg_plus", "pairwise"])
def test_engines_agree(protocol: str, tmp_path: Path, commands: Commands) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT.replace("PROTOCOL", protocol))
    outcomes = []
    for engine in ("serial", "flower"):
        folder = tmp_path / engine
        options = ["--engine", engine, "--workers", "2", "--output", folder]
        process = commands.start("simulate", [KNNPER, "simulate", path, *options], {})
        assert process.wait() == 0, process.written
        outcomes.append(outcome(folder))
    assert outcomes[0] == outcomes[1]
