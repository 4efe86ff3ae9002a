"""Text and rows of features instead of images: through training, memory, whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec
from knnper.errors import ConfigError
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from knnper.strategies.agnostic import shares_and_losses
from knnper.strategies.core.evaluation import evaluate
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedem import example_losses
from knnper.strategies.hypcluster import ClusterModels, best_position
from knnper.strategies.qfedavg import mean_loss
from tests.strategies.tiny import text_task

KEY = RandomKey(4)


def counting(count: int, seed: int) -> Examples:
    """Return windows in which each id follows from the one before: 0, 1, 2, 3, 0."""
    first = np.random.default_rng(seed).integers(0, 4, (count, 1))
    text = torch.from_numpy((first + np.arange(6)) % 4)
    return Examples(text[:, None, None, :5].to(torch.uint8), text[:, 5])


@pytest.mark.parametrize("all_positions", [True, False])
def test_the_lstm_learns_what_follows(all_positions: bool) -> None:
    learned = text_task(all_positions=all_positions, local_epochs=15)
    result = local_sgd(learned, learned.initial_weights, counting(60, 1), 1.0, KEY)
    counts = evaluate(ModelPredictor(learned, result.weights), counting(40, 2))
    assert counts.accuracy == 1.0


def test_training_minimises_the_models_own_loss() -> None:
    learned = text_task(local_steps=1)
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
    learned = text_task(local_steps=1)
    head, examples = learned.head_mask, counting(8, 1)
    start = learned.initial_weights
    whole = local_sgd(learned, start, examples, 0.5, KEY)
    alone = local_sgd(learned, start, examples, 0.5, KEY, trainable=head)
    torch.testing.assert_close(alone.weights[head], whole.weights[head])
    assert torch.equal(alone.weights[~head], start[~head])


def test_a_head_alone_learns_from_embeddings_where_only_the_last_counts() -> None:
    learned = text_task(all_positions=False, local_epochs=2)
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
        text_task(augmentation="flip")


def results_of(document: dict[str, Any], path: Path) -> dict[str, Any]:
    experiment = load_experiment(document, experiment_catalogue())
    folder = RunFolder.create(path, experiment)
    simulate(open_workbench(experiment), folder, Observer(), ["test"])
    return folder.results()


def over_text(path: Path) -> dict[str, Any]:
    windows = {"window": 6, "stride": 2, "min_characters": 50}
    return {
        "name": "text",
        "data": {"name": "plays", "path": str(path), **windows},
        "partition": {"name": "natural", "unseen_fraction": 0.25},
        "model": {"name": "stacked_lstm", "hidden_dim": 8, "num_layers": 1},
        "training": {"num_rounds": 2, "batch_size": 8, "learning_rate": 1.0},
        "method": {"name": "knn_per"},
        "run": {"engine": "serial"},
    }


def test_a_whole_run_over_text(tmp_path: Path) -> None:
    path = tmp_path / "said.json"
    texts = {f"speaker {number}": "abcd"[number:] * 60 for number in range(4)}
    path.write_text(json.dumps(texts))
    results = results_of(over_text(path), tmp_path / "run")
    assert results["seen"]["num_clients"] == 3
    # Whatever the network learned: the same window is followed by the same.
    assert results["seen"]["accuracy_weighted"] > 0.9
    assert results["unseen"]["accuracy_weighted"] > 0.9


def own_losses(learned: Task, weights: torch.Tensor, given: Examples) -> torch.Tensor:
    learned.model.load(weights)
    inputs = learned.normalize(given.images)
    return learned.model.module.eval().losses(inputs, given.labels).detach()


@pytest.mark.parametrize("count", [0, 40])
def test_losses_are_what_training_minimises(count: int) -> None:
    learned, examples = text_task(), counting(count, 1)
    weights = learned.initial_weights
    losses = learned.losses(weights, examples)
    assert losses.shape == (count,)
    if count:
        torch.testing.assert_close(losses, own_losses(learned, weights, examples))
    total = learned.loss_sum(weights, examples)
    torch.testing.assert_close(total, losses.sum())


def test_where_the_last_character_counts_losses_are_those_of_the_logits() -> None:
    learned, examples = text_task(all_positions=False), counting(20, 1)
    weights = learned.initial_weights
    logits = learned.logits(weights, examples.images)
    for reduction, losses in (
        ("none", learned.losses(weights, examples)),
        ("sum", learned.loss_sum(weights, examples)),
    ):
        expected = functional.cross_entropy(
            logits, examples.labels, reduction=reduction
        )
        assert torch.equal(losses, expected)


def test_methods_judge_models_by_what_training_minimises() -> None:
    learned, examples = text_task(), counting(12, 1)
    models = [learned.fresh_weights(KEY.child(str(number))) for number in range(3)]
    losses = torch.stack(
        [own_losses(learned, weights, examples) for weights in models], dim=1
    )
    torch.testing.assert_close(example_losses(learned, models, examples), losses)
    means = losses.mean(dim=0)
    torch.testing.assert_close(mean_loss(learned, models[0], examples), means[0])
    payload = ClusterModels(tuple(models), (0, 1, 2), 0)
    assert best_position(learned, payload, (examples,)) == int(means.argmin())
    kinds = torch.zeros(12, dtype=torch.int64)
    _, client_losses = shares_and_losses(learned, models[1], examples, kinds, 1)
    torch.testing.assert_close(client_losses, means[1:2])


FEATURES = InputSpec(
    (1, 1, 3), 2, (100.0, 0.0, -5.0), (50.0, 1.0, 0.1), dtype="float32"
)


def rows(count: int, seed: int) -> Examples:
    """Return rows whose label is 1 where the first two features agree in sign."""
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=(count, 3))
    labels = (drawn[:, 0] > 0) == (drawn[:, 1] > 0)
    scaled = drawn * np.array(FEATURES.std) + np.array(FEATURES.mean)
    images = torch.from_numpy(scaled.astype(np.float32)).reshape(count, 1, 1, 3)
    return Examples(images, torch.from_numpy(labels.astype(np.int64)))


def test_the_check_of_an_experiment_knows_the_sites_inputs() -> None:
    document = {
        "name": "features",
        "data": {
            "name": "sites",
            "image_shape": [1, 1, 3],
            "class_names": ["no", "yes"],
            "mean": [0.0, 0.0, 0.0],
            "std": [1.0, 1.0, 1.0],
            "dtype": "float32",
        },
        "partition": {"name": "sites"},
        "model": {"name": "mlp"},
        "training": {"augmentation": "flip"},
        "method": {"name": "fedavg"},
    }
    with pytest.raises(ConfigError, match=r"augmentation: found 'flip'") as caught:
        load_experiment(document, experiment_catalogue())
    assert len(caught.value.problems) == 1


def test_a_whole_run_over_a_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    examples = rows(300, 5)
    lines = [
        ",".join([*map(repr, values), "yes" if label else "no"])
        for values, label in zip(
            examples.images.reshape(300, 3).tolist(),
            examples.labels.tolist(),
            strict=True,
        )
    ]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["a,b,c,kind", *lines]))
    experiment = {
        "name": "features",
        "data": {"name": "table", "train": str(table), "label": "kind"},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "mlp", "hidden_sizes": [8], "norm": "group"},
        "training": {"num_rounds": 3, "batch_size": 8, "learning_rate": 0.1},
        "method": {"name": "knn_per"},
        "run": {"engine": "serial"},
    }
    seen = results_of(experiment, tmp_path / "run")["seen"]
    assert seen["num_clients"] == 3
    assert seen["accuracy_weighted"] > 0.5
