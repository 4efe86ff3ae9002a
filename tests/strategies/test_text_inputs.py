"""Text instead of images: through training, memory and a whole run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.config.errors import ConfigError
from knnper.config.loading import load_experiment
from knnper.config.sections import Choice, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples, InputSpec
from knnper.models.stacked_lstm import StackedLstmSettings
from server.observer import SilentObserver
from server.run_folder import RunFolder
from simulation.catalogue import experiment_catalogue
from simulation.runner import simulate
from simulation.workbench import open_workbench
from strategies.assembly import build_task
from strategies.core.evaluation import evaluate
from strategies.core.local_sgd import local_sgd
from strategies.core.model_predictor import ModelPredictor
from strategies.core.task import Task

SPEC = InputSpec((1, 1, 5), 4, (), (), dtype="token")
KEY = RandomKey(4)


def task(*, all_positions: bool = True, **training: Any) -> Task:
    settings = StackedLstmSettings(
        character_dim=4, hidden_dim=8, num_layers=1, all_positions=all_positions
    )
    return build_task(
        Choice("stacked_lstm", settings),
        TrainingSettings(batch_size=8, **training),
        SPEC,
        KEY,
        evaluation_batch_size=16,
    )


def counting(count: int, seed: int) -> Examples:
    """Return windows in which each id follows from the one before: 0, 1, 2, 3, 0."""
    first = np.random.default_rng(seed).integers(0, 4, (count, 1))
    text = torch.from_numpy((first + np.arange(6)) % 4)
    return Examples(text[:, None, None, :5].to(torch.uint8), text[:, 5])


@pytest.mark.parametrize("all_positions", [True, False])
def test_the_lstm_learns_what_follows(all_positions: bool) -> None:
    learned = task(all_positions=all_positions, local_epochs=15)
    result = local_sgd(learned, learned.initial_weights, counting(60, 1), 1.0, KEY)
    found = evaluate(ModelPredictor(learned, result.weights), counting(40, 2))
    assert found.accuracy == 1.0


def test_training_minimises_the_models_own_loss() -> None:
    learned = task(local_steps=1)
    examples = counting(8, 1)
    model = learned.model.module
    result = local_sgd(learned, learned.initial_weights, examples, 0.5, KEY)
    learned.model.load(learned.initial_weights)
    learned.model.gradient.zero_()
    losses = model.losses(learned.normalize(examples.images), examples.labels)
    losses.mean().backward()  # type: ignore[no-untyped-call]
    expected = learned.initial_weights - 0.5 * learned.model.gradient
    torch.testing.assert_close(result.weights, expected)
    assert result.train_loss == pytest.approx(float(losses.detach().mean()))


def test_a_head_alone_learns_from_all_positions_too() -> None:
    learned = task(local_steps=1)
    head, examples = learned.head_mask, counting(8, 1)
    start = learned.initial_weights
    whole = local_sgd(learned, start, examples, 0.5, KEY)
    alone = local_sgd(learned, start, examples, 0.5, KEY, trainable=head)
    torch.testing.assert_close(alone.weights[head], whole.weights[head])
    assert torch.equal(alone.weights[~head], start[~head])


def test_a_head_alone_learns_from_embeddings_where_only_the_last_counts() -> None:
    learned = task(all_positions=False, local_epochs=2)
    examples, passes = counting(40, 1), []
    normalize = learned.normalize

    def counted(images: torch.Tensor) -> torch.Tensor:
        passes.append(len(images))
        return normalize(images)

    watched = replace(learned, normalize=counted)
    head, start = learned.head_mask, learned.initial_weights
    local_sgd(watched, start, examples, 0.5, KEY, trainable=head)
    assert sum(passes) == 40


def test_text_cannot_be_augmented() -> None:
    with pytest.raises(ConfigError, match=r"are text \(token\), which cannot be flipp"):
        task(augmentation="flip")


def experiment_over(path: Path, method: str) -> dict[str, Any]:
    return {
        "name": "text",
        "data": {
            "name": "plays",
            "path": str(path),
            "window": 6,
            "stride": 2,
            "min_characters": 50,
        },
        "partition": {"name": "natural", "unseen_fraction": 0.25},
        "model": {"name": "stacked_lstm", "hidden_dim": 8, "num_layers": 1},
        "training": {"num_rounds": 2, "batch_size": 8, "learning_rate": 1.0},
        "method": {"name": method},
        "run": {"engine": "serial"},
    }


@pytest.mark.parametrize("method", ["knn_per", "fedper"])
def test_a_whole_run_over_text(tmp_path: Path, method: str) -> None:
    path = tmp_path / "said.json"
    said = {f"speaker {one}": "abcd"[one:] * 60 for one in range(4)}
    path.write_text(json.dumps(said))
    experiment = load_experiment(experiment_over(path, method), experiment_catalogue())
    folder = RunFolder.create(tmp_path / "run", experiment)
    simulate(open_workbench(experiment), folder, SilentObserver(), ["test"])
    results = folder.results()
    assert results["seen"]["num_clients"] == 3
    if method == "knn_per":
        # Whatever the network learned: the same window is followed by the same.
        assert results["seen"]["accuracy_weighted"] > 0.9
        assert results["unseen"]["accuracy_weighted"] > 0.9
