"""Clients of several domains, from files to results."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from knnper.experiment_file import read_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.partition.pflbed import PflbedSettings
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.core.predictors import ModelPredictor
from tests.simulation.knnper_process import simulate as simulate_in_a_process

EXPERIMENT = """
name: domains
data: {name: domain_folder, root: ROOT, channels: 1, test_fraction: 0.3}
partition:
  name: pflbed
  seen_clients_per_domain: 3
  unseen_clients_per_domain: 2
model: {name: tiny_cnn, embedding_dim: 8}
training: {num_rounds: 3, batch_size: 8, learning_rate: 0.05}
method: {name: knn_per}
run: {seed: 3}
"""
DOMAINS, CLASSES, IMAGES = ("dark", "light"), ("low", "middle", "high"), 20


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Return an experiment over noise with a bright row that tells the class."""
    noise = np.random.Generator(np.random.PCG64(1))
    for shade, domain in enumerate(DOMAINS):
        for row, name in enumerate(CLASSES):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for number in range(IMAGES):
                pixels = noise.integers(0, 120, (8, 8), dtype=np.uint8) + 100 * shade
                pixels[2 * row + 1] += np.uint8(30)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT.replace("ROOT", str(tmp_path / "images")))
    return path


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return {row["client"]: row for row in csv.DictReader(file)}


def weighted_accuracy(bench: Workbench, predictor: ModelPredictor, name: str) -> float:
    """Return Σ P_m(y_i) 1[right] / Σ P_m(y_i), in loops."""
    part, dataset = bench.clients.parts[name], bench.clients.dataset
    positions = [*part.train.tolist(), *part.validation.tolist()]
    labels = [int(dataset.train.labels[sample]) for sample in positions]
    test = bench.clients.test(name)
    predicted = predictor(test.images).argmax(dim=1).tolist()
    right, total = 0.0, 0.0
    for guess, label in zip(predicted, test.labels.tolist(), strict=True):
        weight = labels.count(label) / len(labels)
        total += weight
        right += weight * (guess == label)
    return right / total


def test_clients_are_measured_by_their_own_labels(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "cache"))
    overrides = ["method={name: fedavg}", "run.engine=serial"]
    chosen = read_experiment(experiment, experiment_catalogue(), overrides)
    bench = open_workbench(chosen)
    folder = RunFolder.create(tmp_path / "run", chosen)
    simulate(bench, folder, Observer(), ["test"])
    state = load_file(folder.checkpoints / "round-000003" / "state.safetensors")
    predictor = ModelPredictor(bench.task, state["weights"])
    rows = rows_of(folder.path)
    assert [row["seen"] for row in rows.values()] == (["true"] * 3 + ["false"] * 2) * 2
    # 0.3 of 60 images of a domain, shared out among three classes.
    assert {row["num_test"] for row in rows.values()} == {"18"}
    for name, row in rows.items():
        expected = weighted_accuracy(bench, predictor, name)
        assert float(row["accuracy"]) == pytest.approx(expected)
    unseen = [float(row["accuracy"]) for row in rows.values() if row["seen"] == "false"]
    document = json.loads((folder.path / "results.json").read_text())["unseen"]
    assert document["accuracy_mean"] == pytest.approx(math.fsum(unseen) / 4)
    assert document["accuracy_weighted"] == pytest.approx(math.fsum(unseen) / 4)


def test_a_domain_of_pacs_is_divided_as_in_the_paper() -> None:
    text = Path("papers/bases/pacs_paper.yaml").read_text("utf-8")
    document = yaml.safe_load(text)
    settings = PflbedSettings(
        **{name: part for name, part in document["partition"].items() if name != "name"}
    )
    to_clients = 1 - document["data"]["test_fraction"]
    validation = to_clients * settings.validation_fraction
    unseen = (to_clients - validation) * settings.unseen_fraction
    parts = [to_clients - validation - unseen, unseen, validation, 1 - to_clients]
    assert parts == pytest.approx([0.60, 0.20, 0.05, 0.15], abs=1e-3)


@pytest.mark.slow
@pytest.mark.ray
def test_engines_give_the_same_results(experiment: Path, tmp_path: Path) -> None:
    results_of = {}
    for engine in ("serial", "flower"):
        folder = tmp_path / engine
        simulate_in_a_process(experiment, "--engine", engine, "--output", folder)
        results = json.loads((folder / "results.json").read_text())
        groups = results["seen"], results["unseen"]
        results_of[engine] = ((folder / "clients.csv").read_bytes(), groups)
    assert results_of["serial"] == results_of["flower"]
