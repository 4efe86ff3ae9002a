"""A site with a few images of 8x8 pixels, and tiny models for it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from knnper.client.site_state import SiteState
from knnper.data.examples import Examples, InputSpec
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.datastore.prediction import KnnPredictor
from knnper.datastore.store import open_store
from knnper.experiment_file import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.exported_model import GlobalModel, global_model
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.knn_per import knn_predictor

SPEC = InputSpec((8, 8, 1), 4, (0.5,), (0.3,))
TASK = SiteTask(SPEC, ("ant", "bee", "cat", "dog"))
NAME = "site-a"


def small_experiment(**changes: Any) -> dict[str, Any]:
    """Return an experiment's document."""
    return {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn", "embedding_dim": 8},
        "method": {"name": "knn_per"},
        **changes,
    }


def small_model(
    seed: int = 0,
    method: str = "knn_per",
    embedding_dim: int = 8,
    **personalization: Any,
) -> GlobalModel:
    """Return an untrained model: nothing here depends on its accuracy."""
    document = small_experiment(
        model={"name": "tiny_cnn", "embedding_dim": embedding_dim},
        training={"num_rounds": 3},
        method={"name": method},
        personalization=personalization,
        run={"seed": seed, "engine": "serial"},
    )
    return untrained(document, TASK)


def untrained(document: dict[str, Any], learned: SiteTask) -> GlobalModel:
    """Return the model with which an experiment begins."""
    experiment = load_experiment(document, experiment_catalogue())
    task = assemble(experiment, learned.spec).task
    return global_model(experiment, task, learned, task.initial_weights)


def feature_model(
    names: tuple[str, ...] = ("age", "height", "weight"),
    seed: int = 0,
) -> GlobalModel:
    """Return an untrained model of rows of three features."""
    spec = InputSpec((1, 1, 3), 2, (1.0, 2.0, 3.0), (0.5, 0.5, 0.5), "float32")
    document = small_experiment(
        name="rows", model={"name": "mlp", "hidden_sizes": [6, 5]}, run={"seed": seed}
    )
    learned = SiteTask(spec, ("no", "yes"), names)
    return untrained(document, learned)


def drawn(split: str, count: int, num_labels: int = 4) -> NamedExamples:
    """Return examples whose first row of pixels tells the label."""
    generator = RandomKey(7, (split,)).numpy()
    images = generator.integers(0, 256, (count, 8, 8, 1), "uint8")
    labels = generator.integers(0, num_labels, count)
    images[:, :4] = (60 * labels)[:, None, None, None]
    examples = Examples(torch.from_numpy(images), torch.from_numpy(labels))
    return NamedExamples(examples, tuple(f"{split}/{n}.png" for n in range(count)))


def site(train: int = 30, validation: int = 20, test: int = 0) -> SiteData:
    held_out = drawn("validation", validation), drawn("test", test)
    return SiteData(drawn("train", train), *held_out, TASK)


def part(split: NamedExamples, start: int, end: int) -> NamedExamples:
    examples = split.examples.take(torch.arange(start, end))
    return NamedExamples(examples, split.names[start:end])


def with_test_of(data: SiteData, num_moved: int) -> SiteData:
    """The same site, of whose training examples the last are tested on now."""
    kept, count = len(data.train) - num_moved, len(data.train)
    return dataclasses.replace(
        data, train=part(data.train, 0, kept), test=part(data.train, kept, count)
    )


def new_site_state(parent: Path) -> SiteState:
    return SiteState(parent / "state", NAME)


def installed(parent: Path, model: GlobalModel, data: SiteData) -> SiteState:
    """Return the state of a client that has installed a model."""
    site_state = new_site_state(parent)
    site_state.install(model, data, took_part=False)
    return site_state


def simulated(model: GlobalModel, data: SiteData) -> KnnPredictor:
    """Return what serves the simulation's client of this name."""
    base = ModelPredictor(model.task, model.weights)
    key = RandomKey(model.card.seed).child("personalize", NAME)
    return knn_predictor(
        base, model.spec.num_classes, data.client_data(), model.card.memory, key
    )


def queries(count: int = 16) -> torch.Tensor:
    return drawn("queries", count).examples.images


def stored_names(site_state: SiteState) -> list[str | None]:
    """Return the names in the store, in the order of their ids."""
    with open_store(site_state.folder.store) as store:
        return store.external_ids(store.contents().ids)


def model_folders(site_state: SiteState) -> set[str]:
    return {path.name for path in site_state.folder.models.iterdir()}
