"""Rows of features instead of images: through training, memory and a whole run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.examples import Examples, InputSpec
from knnper.errors import ConfigError
from knnper.experiment import Choice, TrainingSettings
from knnper.loading import load_experiment
from knnper.models.networks import MlpSettings
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.run import simulate
from knnper.simulation.workbench import experiment_catalogue, open_workbench
from knnper.strategies.catalogue import build_task
from knnper.strategies.core.predictors import ModelPredictor, evaluate
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

SPEC = InputSpec((1, 1, 3), 2, (100.0, 0.0, -5.0), (50.0, 1.0, 0.1), dtype="float32")
KEY = RandomKey(4)


def task(**training: Any) -> Task:
    return build_task(
        Choice("mlp", MlpSettings(hidden_sizes=(8,))),
        TrainingSettings(batch_size=8, local_epochs=20, learning_rate=0.1, **training),
        SPEC,
        KEY,
        evaluation_batch_size=16,
    )


def rows(count: int, seed: int) -> Examples:
    """Return rows whose label is 1 where the first two features agree in sign."""
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=(count, 3))
    labels = (drawn[:, 0] > 0) == (drawn[:, 1] > 0)
    scaled = drawn * np.array(SPEC.std) + np.array(SPEC.mean)
    images = torch.from_numpy(scaled.astype(np.float32)).reshape(count, 1, 1, 3)
    return Examples(images, torch.from_numpy(labels.astype(np.int64)))


def test_a_network_learns_from_features() -> None:
    learned = task()
    result = local_sgd(learned, learned.initial_weights, rows(200, 1), 0.1, KEY)
    found = evaluate(ModelPredictor(learned, result.weights), rows(200, 2))
    assert found.accuracy is not None
    assert found.accuracy > 0.9


def test_features_are_standardised_and_not_scaled() -> None:
    learned = task()
    examples = rows(5, 3)
    flat = (examples.images.reshape(5, 3) - torch.tensor(SPEC.mean)) / torch.tensor(
        SPEC.std
    )
    found = learned.normalize(examples.images)
    torch.testing.assert_close(found.flatten(1), flat)


@pytest.mark.parametrize("augmentation", ["flip", "crop_flip"])
def test_features_cannot_be_augmented(augmentation: str) -> None:
    with pytest.raises(ConfigError, match="which cannot be flipped or cropped"):
        task(augmentation=augmentation)


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
    with pytest.raises(ConfigError, match=r"augmentation: found 'flip'") as one:
        load_experiment(document, experiment_catalogue())
    assert len(one.value.problems) == 1


def experiment_over(table: Path, method: str) -> dict[str, Any]:
    return {
        "name": "features",
        "data": {"name": "table", "train": str(table), "label": "kind"},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "mlp", "hidden_sizes": [8], "norm": "group"},
        "training": {"num_rounds": 3, "batch_size": 8, "learning_rate": 0.1},
        "method": {"name": method},
        "run": {"engine": "serial"},
    }


@pytest.mark.parametrize("method", ["knn_per", "scaffold"])
def test_a_whole_run_over_a_table(tmp_path: Path, method: str) -> None:
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
    experiment = load_experiment(experiment_over(table, method), experiment_catalogue())
    folder = RunFolder.create(tmp_path / "run", experiment)
    simulate(open_workbench(experiment), folder, Observer(), ["test"])
    seen = folder.results()["seen"]
    assert seen["num_clients"] == 3
    assert seen["accuracy_weighted"] > 0.5
