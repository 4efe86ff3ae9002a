"""The page on results, held against a small run."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from knnper.data.examples import Normalizer
from knnper.experiment import load_experiment
from knnper.models import FlatModel
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.workbench import experiment_catalogue, open_workbench, simulate

Listings = Callable[[str, str], list[str]]
Tables = Callable[[str], dict[tuple[str, str], dict[str, list[str]]]]

PAGE = "docs/results.md"
DOCUMENT = {
    "name": "demo",
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 4, "unseen_fraction": 0.25},
    "model": {"name": "tiny_cnn", "embedding_dim": 8},
    "training": {"num_rounds": 2, "batch_size": 64},
    "method": {"name": "scaffold"},
    "run": {"engine": "serial", "validate_every": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with a finished run in runs/demo, and a cache of its own."""
    folder = tmp_path_factory.mktemp("results")
    experiment = load_experiment(DOCUMENT, experiment_catalogue())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNNPER_CACHE", str(folder / "cache"))
        bench = open_workbench(experiment)
        run = RunFolder.create(folder / "runs/demo", experiment)
        simulate(bench, run, Observer(), ["knnper", "simulate"])
        yield folder


@pytest.fixture
def results(place: Path) -> Any:
    return json.loads((place / "runs/demo/results.json").read_text())


def test_the_figures_are_described(tables: Tables, results: Any) -> None:
    pages = tables(PAGE)
    described = {
        ("`results.json`", ""): results,
        ("`results.json`", "Figures of a group"): results["seen"],
        ("`results.json`", "`training`"): results["training"],
        ("`results.json`", "`manifest`"): results["manifest"],
    }
    for place, figures in described.items():
        assert pages[place].keys() == figures.keys(), place


def test_the_columns_are_described(tables: Tables, place: Path) -> None:
    with (place / "runs/demo/clients.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert list(tables(PAGE)["`clients.csv`", ""]) == columns


def test_the_figures_of_a_round_are_described(tables: Tables, place: Path) -> None:
    lines = (place / "runs/demo/rounds.jsonl").read_text().splitlines()
    described = tables(PAGE)["`rounds.jsonl`", ""]
    always = described.keys() - {"failures"}
    assert [json.loads(line).keys() for line in lines] == [always] * 2


def test_the_files_are_described(tables: Tables, place: Path) -> None:
    run = place / "runs/demo"
    described = " ".join(tables("docs/architecture.md")["The run folder", ""])
    for path in run.iterdir():
        assert path.name in described
    # SCAFFOLD keeps client states; the other methods' runs have all else in common.
    assert (run / "clients").is_dir()


def test_the_listing_loads_the_model(
    place: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch, results: Any
) -> None:
    monkeypatch.chdir(place)
    (listing,) = listings(PAGE, "python")
    names: dict[str, Any] = {}
    exec(compile(listing, PAGE, "exec"), names)
    model, dataset = names["model"], names["dataset"]
    assert isinstance(model, FlatModel)
    assert names["newest"].name == "round-000002"
    assert not names["module"].training
    images = Normalizer(dataset.spec)(torch.from_numpy(dataset.test.images.copy()))
    predicted = names["module"](images).argmax(dim=1).numpy()
    groups = [results["seen"], results["unseen"]]
    num_correct = [
        one["accuracy_weighted"] * one["num_test_examples"] for one in groups
    ]
    assert (predicted == dataset.test.labels).sum() == round(sum(num_correct))
    exported = load_file("global.safetensors")
    assert torch.equal(model.flatten(exported), names["weights"])
    overrides = ["model.weights=global.safetensors"]
    again = load_experiment(DOCUMENT, experiment_catalogue(), overrides)
    assert torch.equal(open_workbench(again).task.initial_weights, names["weights"])
