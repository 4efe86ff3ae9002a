"""Pages whose listings and tables are held against what they describe."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from knnper.data.normalization import Normalizer
from knnper.datastore.memory import KnnSettings
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import open_workbench

read_schema = pytest.importorskip("pyarrow.parquet").read_schema
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
    "run": {"engine": "serial", "validate_every": 1, "save_predictions": True},
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


def test_page_describes_the_figures(tables: Tables, results: Any) -> None:
    pages = tables(PAGE)
    described = {
        ("`results.json`", ""): results,
        ("`results.json`", "Figures of a group"): results["seen"],
        ("`results.json`", "`training`"): results["training"],
        ("`results.json`", "`manifest`"): results["manifest"],
    }
    for place, figures in described.items():
        assert pages[place].keys() == figures.keys(), place


def test_page_describes_the_columns(tables: Tables, place: Path) -> None:
    with (place / "runs/demo/clients.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert list(tables(PAGE)["`clients.csv`", ""]) == columns


def test_page_describes_the_columns_of_predictions(tables: Tables, place: Path) -> None:
    columns = read_schema(place / "runs/demo/predictions.parquet").names
    assert list(tables(PAGE)["`predictions.parquet`", ""]) == columns


def test_page_describes_the_figures_of_a_round(tables: Tables, place: Path) -> None:
    lines = (place / "runs/demo/rounds.jsonl").read_text().splitlines()
    described = tables(PAGE)["`rounds.jsonl`", ""]
    always = described.keys() - {"failures"}
    assert [json.loads(line).keys() for line in lines] == [always] * 2


def test_page_describes_the_files_of_a_run(tables: Tables, place: Path) -> None:
    run = place / "runs/demo"
    described = " ".join(tables("docs/architecture.md")["The run folder", ""])
    for path in run.iterdir():
        assert path.name in described
    # SCAFFOLD keeps client states; the other methods' runs have all else in common.
    assert (run / "clients").is_dir()


def test_listings_read_the_run(
    place: Path,
    listings: Listings,
    monkeypatch: pytest.MonkeyPatch,
    results: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    of_predictions, listing = listings(PAGE, "python")
    exec(compile(of_predictions, PAGE, "exec"), {})
    average = results["seen"]["accuracy_weighted"]
    assert capsys.readouterr().out.endswith(f"seen clients: {average:.4f}\n")
    names: dict[str, Any] = {}
    exec(compile(listing, PAGE, "exec"), names)
    trained = trained_model(place / "runs/demo")
    model, dataset = trained.task.model, trained.dataset
    images = Normalizer(dataset.spec)(torch.from_numpy(dataset.test.images.copy()))
    predicted = names["module"](images).argmax(dim=1).numpy()
    groups = [results["seen"], results["unseen"]]
    num_correct = [
        group["accuracy_weighted"] * group["num_test_examples"] for group in groups
    ]
    assert (predicted == dataset.test.labels).sum() == round(sum(num_correct))
    exported = load_file("global.safetensors")
    assert torch.equal(model.flatten(exported), trained.weights)
    overrides = ["model.weights=global.safetensors"]
    again = load_experiment(DOCUMENT, experiment_catalogue(), overrides)
    assert torch.equal(open_workbench(again).task.initial_weights, trained.weights)


PRIOR_PAGE = "docs/methods/knn_per.md"

CLIENTS = """client,num_train,num_validation,knn_weight
a,8,2,0.1
b,80,20,0.5
c,0,0,0.0
"""


def test_listing_makes_a_prior(
    tmp_path: Path,
    listings: Callable[[str, str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/clients.csv").write_text(CLIENTS)
    (listing,) = listings(PRIOR_PAGE, "python")
    names: dict[str, Any] = {}
    exec(compile(listing, PRIOR_PAGE, "exec"), names)
    prior = [asdict(point) for point in names["points"]]
    assert prior == [
        {"num_examples": 10, "knn_weight": 0.1},
        {"num_examples": 100, "knn_weight": 0.5},
    ]
    document = {
        "name": "again",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "knn_per"},
        "personalization": {"tuning": {"prior": prior}},
    }
    experiment = load_experiment(document, experiment_catalogue())
    settings = experiment.personalization.settings
    assert isinstance(settings, KnnSettings)
    assert settings.tuning.prior == tuple(names["points"])
