"""Whole runs on a GPU: every method, both engines, the same numbers each time."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from knnper.experiment import Experiment, Precision
from knnper.experiment_file import to_yaml
from knnper.flat_model import FlatModel
from knnper.networks import OptionalNorm, TinyCnnSettings
from knnper.seeding import RandomKey
from knnper.simulation.workbench import open_workbench
from knnper.split_network import split
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.training import local_sgd
from tests.simulation.knnper_process import simulate as run_command
from tests.simulation.knnper_process import validations
from tests.simulation.test_every_method import FAST, experiment, whole

pytestmark = pytest.mark.gpu


def on_gpu(chosen: Experiment, share: float = 1.0) -> Experiment:
    return replace(chosen, run=replace(chosen.run, gpus_per_client=share))


def losses(folder: Path) -> list[float]:
    """Return each client's loss on its test split, of the model that it serves."""
    with (folder / "clients.csv").open(encoding="utf-8") as file:
        found = [float(row["log_loss"]) for row in csv.DictReader(file)]
    assert len(found) == 9
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_reproducible_and_as_on_the_cpu(tmp_path: Path, method: str) -> None:
    chosen = experiment(method)
    # A round or two: differences of rounding grow with each step.
    chosen = replace(chosen, training=replace(chosen.training, num_rounds=2))
    expected = whole(on_gpu(chosen), tmp_path / "one")
    assert torch.cuda.max_memory_allocated() > 0, "nothing was computed on the GPU"
    assert whole(on_gpu(chosen), tmp_path / "two") == expected
    whole(chosen, tmp_path / "cpu")
    on_both = losses(tmp_path / "one"), losses(tmp_path / "cpu")
    assert on_both[0] == pytest.approx(on_both[1], rel=0.02, abs=0.02)


@pytest.mark.ray
@pytest.mark.parametrize("method", FAST)
def test_clients_that_share_a_gpu_end_with_the_same_bits(
    tmp_path: Path, method: str
) -> None:
    chosen = experiment(method)
    chosen = on_gpu(replace(chosen, run=replace(chosen.run, validate_every=3)), 0.5)
    expected = whole(chosen, tmp_path / "serial")
    path = tmp_path / "every.yaml"
    path.write_text(to_yaml(chosen))
    # Three are asked for, and a GPU has room for two.
    options = ("--engine", "flower", "--workers", "3")
    run_command(path, *options, "--output", tmp_path / "flower")
    digest = json.loads((tmp_path / "flower" / "results.json").read_text())
    assert digest["training"]["state_sha256"] == expected[0]
    assert (tmp_path / "flower" / "clients.csv").read_bytes() == expected[1]
    assert validations(tmp_path / "flower") == validations(tmp_path / "serial")


@pytest.mark.parametrize("precision", ["bfloat16", "auto"])
def test_other_precisions_run(
    tmp_path: Path, precision: Precision | Literal["auto"]
) -> None:
    chosen = on_gpu(experiment("knn_per"))
    chosen = replace(chosen, training=replace(chosen.training, precision=precision))
    device = torch.device("cuda")
    fixed = open_workbench(chosen, device).experiment
    assert whole(fixed, tmp_path / "one") == whole(fixed, tmp_path / "two")


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_a_recorded_pass_gives_the_bits_of_a_plain_one(norm: OptionalNorm) -> None:
    chosen = on_gpu(experiment("fedavg"))
    settings = chosen.model.settings
    assert isinstance(settings, TinyCnnSettings)
    settings = replace(settings, norm=norm)
    chosen = replace(chosen, model=replace(chosen.model, settings=settings))
    bench = open_workbench(chosen, torch.device("cuda"))
    task, rate = bench.task, chosen.training.learning_rate
    found = []
    for replayable in (True, False):
        task.model.module.replayable = replayable
        trained = task.initial_weights
        for member in bench.roster.members:
            examples = bench.clients.data(member.name).train
            key = RandomKey(0).child(member.name)
            trained = local_sgd(task, trained, examples, rate, key).weights
        found.append(trained)
        assert task.model.recorded, "nothing was recorded"
    assert torch.equal(*found)


def test_a_network_that_cudnn_cannot_read_is_trained_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    layers = nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 3))
    images = torch.rand(8, 1, 6, 6)
    whole = split(network, images[:2])
    expected = whole.train()(images)
    model = FlatModel(whole, torch.device("cuda"))
    assert "Make all widths multiples of four" in caplog.text
    found = model.module(images.cuda())
    found.sum().backward()
    assert torch.allclose(found.cpu(), expected, atol=1e-5)
    assert torch.isfinite(model.gradient).all()
