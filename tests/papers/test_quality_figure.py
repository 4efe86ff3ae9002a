"""The figure of the global model's quality, with the digits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knnper.seeding import RandomKey
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.core.training import local_sgd
from papers.catalogue import make_figure
from papers.quality import CentralTraining, QualitySettings
from tests.papers.small_files import experiment, quiet

SETTINGS = QualitySettings(epochs=(2.0, 0.0), alpha=(0.1, 1.0), deals=2)


EXPERIMENT = experiment(
    partition={
        "name": "iid",
        "num_clients": 6,
        "unseen_fraction": 0.34,
        "validation_fraction": 0.3,
    },
    model={"name": "tiny_cnn", "embedding_dim": 8},
    training={"batch_size": 16, "learning_rate": 0.05},
    personalization={"name": "knn", "num_neighbors": 5},
    method={"name": "fedavg"},
    run={},
)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return open_workbench(EXPERIMENT)


def test_stages_are_steps_of_one_training(bench: Workbench, tmp_path: Path) -> None:
    key = RandomKey(1)
    training = CentralTraining(bench, (0.0, 0.5), tmp_path, key)
    seen = [part for part in bench.partition.clients if part.seen]
    num_examples = sum(len(part.train) + len(part.validation) for part in seen)
    assert len(training.examples) == num_examples
    assert torch.equal(training.weights_at(1), bench.task.initial_weights)
    steps = round(0.5 * (num_examples // 16))
    task = replace(bench.task, training=replace(bench.task.training, local_steps=steps))
    start = bench.task.initial_weights
    expected = local_sgd(task, start, training.examples, 0.05, key.child("stage", 2))
    assert expected.num_steps == steps
    assert torch.equal(training.weights_at(2), expected.weights)
    # Another process goes on from what is kept.
    again = CentralTraining(bench, (0.0, 0.5), tmp_path, key)
    assert torch.equal(again.weights_at(2), expected.weights)


def test_a_better_model_has_better_neighbours(tmp_path: Path) -> None:
    shown = make_figure("quality", EXPERIMENT, SETTINGS, tmp_path / "q", quiet)
    for table in shown.tables:
        worse, better = (float(cell.rstrip(" %")) for cell in table.header[1:])
        assert worse < 30 < 50 < better
        for _, first, last in table.rows:
            assert float(first.rstrip(" %")) < float(last.rstrip(" %"))
    rows = (tmp_path / "q" / "quality.csv").read_text().splitlines()
    assert rows[0] == "kind,alpha,global_accuracy,accuracy,accuracy_std,epochs"
    assert len(rows) == 1 + 2 * 2 * 2
    assert [row.split(",")[-1] for row in rows[1:3]] == ["0.0", "2.0"]
