"""Data that change under a figure: what is there of it is not mixed with new parts."""

from dataclasses import replace
from pathlib import Path

import pytest

from knnper.data.digits import DigitsSettings
from knnper.data.examples import Dataset
from knnper.errors import FolderTakenError
from knnper.experiment import Experiment
from knnper.loading import load_experiment
from knnper.simulation.trained_model import trained_model
from knnper.simulation.workbench import experiment_catalogue
from papers.catalogue import FIGURES, make_figure
from papers.figures import identity_of
from tests.simulation.finished_run import finished_run


def experiment(method: str) -> Experiment:
    document = {
        "name": "figure",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 6, "unseen_fraction": 0.34},
        "model": {"name": "tiny_cnn", "embedding_dim": 4},
        "method": {"name": method},
        "run": {"engine": "serial"},
    }
    return load_experiment(document, experiment_catalogue())


def inverted(dataset: Dataset) -> Dataset:
    images = 255 - dataset.train.images
    return replace(dataset, train=replace(dataset.train, images=images))


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "method"), [("quality", "fedavg"), ("fedbasis-collapse", "fedbasis")]
)
def test_a_figure_that_trains_is_not_continued_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    settings = FIGURES[name].settings()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make_figure(name, experiment(method), settings, tmp_path, interrupt)
    load = DigitsSettings.load
    monkeypatch.setattr(DigitsSettings, "load", lambda one: inverted(load(one)))
    with pytest.raises(FolderTakenError, match="another dataset"):
        make_figure(name, experiment(method), settings, tmp_path, interrupt)


def test_a_figure_of_a_run_is_one_of_its_data(tmp_path: Path) -> None:
    model = trained_model(finished_run(tmp_path))
    clients = model.bench.clients
    other = replace(clients, dataset=inverted(clients.dataset))
    found, changed = (
        identity_of(one)
        for one in (model, replace(model, bench=replace(model.bench, clients=other)))
    )
    assert [name for name in found if found[name] != changed[name]] == ["dataset"]
