"""Statistics with noise: AFL releases once, and all of ε pays for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from knnper.experiment_file import load_experiment
from knnper.privacy import default_delta, noise_multiplier_for
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import open_workbench
from tests.strategies.method_checks import document

pytestmark = pytest.mark.integration

NUM_CLIENTS = 6


def run_afl(path: Path, **privacy: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Run AFL on clients of equal size; return the results and the weights."""
    sections: dict[str, Any] = {
        "partition": {"name": "iid", "num_clients": NUM_CLIENTS},
        "model": {"name": "tiny_cnn", "trained": "head", "embedding_dim": 16},
        "training": {"num_rounds": 1, "participation": 1.0},
        "run": {"engine": "serial", "validate_every": 1},
    }
    if privacy:
        sections["privacy"] = privacy
    chosen = load_experiment(document("afl", **sections), experiment_catalogue())
    folder = RunFolder.create(path, chosen)
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    results: Any = folder.results()
    return results, trained_model(path).weights


def test_statistics_are_one_release(tmp_path: Path) -> None:
    results, weights = run_afl(tmp_path / "noisy", clip_norm=0.5, epsilon=3.0)
    assert results["training"]["num_releases"] == 1
    assert results["training"]["epsilon"] == pytest.approx(3.0, rel=0.05)
    multiplier = noise_multiplier_for(3.0, default_delta(NUM_CLIENTS))
    plan = results["manifest"]["privacy"]
    assert plan["noise_multiplier"] == pytest.approx(multiplier)
    _, plain = run_afl(tmp_path / "plain")
    assert not torch.allclose(weights, plain, atol=1e-2)
    _, again = run_afl(tmp_path / "again", clip_norm=0.5, epsilon=3.0)
    assert torch.equal(weights, again)


def test_without_noise_and_clipping_it_is_the_plain_run(tmp_path: Path) -> None:
    # No update is longer than √2. All clients have the same number of examples but for
    # one, so the means differ by less than that.
    _, plain = run_afl(tmp_path / "plain")
    _, clipped = run_afl(tmp_path / "clipped", clip_norm=1.5, noise_multiplier=0.0)
    torch.testing.assert_close(clipped, plain, rtol=0.05, atol=0.01)
    _, shorter = run_afl(tmp_path / "shorter", clip_norm=0.1, noise_multiplier=0.0)
    assert not torch.allclose(shorter, plain, rtol=0.05, atol=0.01)
