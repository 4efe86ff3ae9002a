"""The figure of the global model's quality, with the digits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.loading import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.reports.figure import QualityOptions
from knnper.simulation.reports.quality_figure import (
    CentralTraining,
    QualitySettings,
    draw_quality,
    quality_settings,
)
from knnper.simulation.workbench import Workbench, experiment_catalogue, open_workbench
from knnper.strategies.core.training import local_sgd

SETTINGS = QualitySettings(epochs=(2.0, 0.0), alphas=(0.1, 1.0), num_deals=2)


def experiment(unseen_fraction: float = 0.34) -> Experiment:
    document = {
        "name": "quality",
        "data": {"name": "digits"},
        "partition": {
            "name": "iid",
            "num_clients": 6,
            "unseen_fraction": unseen_fraction,
            "validation_fraction": 0.3,
        },
        "model": {"name": "tiny_cnn", "embedding_dim": 8},
        "training": {"batch_size": 16, "learning_rate": 0.05},
        "personalization": {"name": "knn", "num_neighbors": 5},
        "method": {"name": "fedavg"},
    }
    return load_experiment(document, experiment_catalogue())


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return open_workbench(experiment())


def quiet(done: int, total: int) -> None:
    assert done <= total


def test_settings_follow_the_experiment() -> None:
    options = QualityOptions(clients=2, deals=4)
    found = quality_settings(experiment(), options)
    assert (found.num_clients, found.num_deals) == (2, 4)
    assert found.knn.num_neighbors == 5
    assert found.validation_fraction == 0.3
    assert found.alphas == (0.1, 0.3, 1.0)


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
    curves = draw_quality(experiment(), tmp_path / "q", SETTINGS, quiet)
    for line in (*curves["alone"], *curves["mixed"]):
        assert line.x[0] < 0.3 < 0.5 < line.x[1]
        assert line.mean[0] < line.mean[1]
        assert line.details == {"epochs": [0.0, 2.0]}
    rows = (tmp_path / "q" / "quality.csv").read_text().splitlines()
    assert rows[0] == "kind,alpha,global_accuracy,accuracy,accuracy_std,epochs"
    assert len(rows) == 1 + 2 * 2 * 2
    for ending in ("png", "svg", "pdf", "json"):
        assert (tmp_path / "q" / f"quality.{ending}").stat().st_size > 0


def test_a_resumed_figure_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 2
        if done == 1:
            raise KeyboardInterrupt

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    draw_quality(experiment(), whole, SETTINGS, quiet)
    with pytest.raises(KeyboardInterrupt):
        draw_quality(experiment(), resumed, SETTINGS, interrupt)
    draw_quality(experiment(), resumed, SETTINGS, quiet)
    for ending in ("csv", "png", "svg", "pdf"):
        files = [folder / f"quality.{ending}" for folder in (whole, resumed)]
        assert files[0].read_bytes() == files[1].read_bytes(), ending


def test_somebody_takes_no_part_in_training(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="all clients took part in training"):
        draw_quality(experiment(0.0), tmp_path / "q", SETTINGS, quiet)
    assert not (tmp_path / "q").exists()
