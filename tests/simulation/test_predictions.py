"""What models say of each test example, in a file of the run."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.errors import DataError, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.predictions import FILE, RunPredictions
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.interface import Run
from knnper.simulation.reports.client_table import read_clients
from knnper.simulation.workbench import open_workbench

pytestmark = pytest.mark.integration

parquet: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def experiment() -> Experiment:
    document = {
        "name": "predicted",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 8,
            "alpha": 0.3,
            "unseen_fraction": 0.25,
        },
        "model": {"name": "tiny_cnn", "embedding_dim": 8},
        "training": {"num_rounds": 2, "batch_size": 16},
        "method": {"name": "knn_per"},
        "run": {"seed": 3, "engine": "serial", "save_predictions": True},
    }
    return load_experiment(document, experiment_catalogue())


class Interrupting(Observer):
    """Stops the run when so many clients have told their results."""

    def __init__(self, clients: int) -> None:
        self.left = clients

    def client_personalized(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def run(path: Path, experiment: Experiment, observer: Observer | None = None) -> Path:
    run_folder = RunFolder(path)
    if not path.exists():
        run_folder = RunFolder.create(path, experiment)
    simulate(open_workbench(experiment), run_folder, observer or Observer(), ["test"])
    return path


def test_figures_follow_from_them(tmp_path: Path, experiment: Experiment) -> None:
    folder = run(tmp_path / "run", experiment)
    table = parquet.read_table(folder / FILE).to_pydict()
    labels, clients = np.array(table["label"]), np.array(table["client"])
    test = open_workbench(experiment).clients.dataset.test
    assert labels.tolist() == test.labels[table["example"]].tolist()
    assert sorted(table["example"]) == list(range(len(test.labels)))
    assert table["client"] == sorted(table["client"])
    assert set(table["split"]) == {"test"}
    assert not (folder / "predictions").exists()
    rows = list(read_clients(folder).itertuples())
    assert {row.client for row in rows} == set(table["client"])
    for row in rows:
        own = clients == row.client
        assert own.sum() == row.num_test
        assert {table["seen"][place] for place in own.nonzero()[0]} == {row.seen}
        for column, accuracy in (
            ("probabilities_personal", row.accuracy),
            ("probabilities_global", row.accuracy_global),
        ):
            found = np.array(table[column], np.float32)[own]
            assert found.sum(axis=1) == pytest.approx(1, abs=1e-5)
            assert (found.argmax(axis=1) == labels[own]).mean() == pytest.approx(
                accuracy
            )


def test_they_are_a_table_in_a_notebook(tmp_path: Path, experiment: Experiment) -> None:
    pytest.importorskip("pandas")
    without = replace(experiment, run=replace(experiment.run, save_predictions=False))
    folder = run(tmp_path / "run", without)
    with pytest.raises(RunError, match=r"a finished run with run\.save_pred"):
        _ = Run(folder).predictions
    # What was not asked for at first is made up for.
    (folder / "results.json").unlink()
    run(folder, experiment)
    table, clients = Run(folder).predictions, Run(folder).clients
    right = table["probabilities_personal"].map(np.argmax) == table["label"]
    assert right.groupby(table["client"]).mean().to_dict() == pytest.approx(
        clients["accuracy"].dropna().to_dict()
    )


@pytest.mark.parametrize("clients", [1, 5])
def test_a_run_that_was_ended_loses_none_and_has_none_twice(
    tmp_path: Path, experiment: Experiment, clients: int
) -> None:
    whole = run(tmp_path / "whole", experiment)
    ended = tmp_path / "ended"
    with pytest.raises(KeyboardInterrupt):
        run(ended, experiment, Interrupting(clients))
    assert not (ended / FILE).exists()
    # What is noted and has no part, as where it was not asked for, is made up for.
    noted = (ended / "personalization.jsonl").read_text().splitlines()
    assert clients <= len(noted)  # with those that were served together
    first = json.loads(noted[0])["result"]["client"]
    (lost,) = (
        part
        for part in (ended / "predictions").iterdir()
        if first in parquet.read_table(part).to_pydict()["client"]
    )
    lost.unlink()
    run(ended, experiment)
    for name in (FILE, "clients.csv"):
        assert (ended / name).read_bytes() == (whole / name).read_bytes()


def test_the_package_is_asked_for_at_the_start(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    message = r"run\.save_predictions needs .* pip install 'knnper\[tables\]'"
    with pytest.raises(DataError, match=message):
        open_workbench(experiment)


def test_a_client_without_examples_has_no_row(tmp_path: Path) -> None:
    kept = RunPredictions(tmp_path)
    nothing = torch.empty((0, 0)), torch.empty((0, 0))
    none = torch.empty(0, dtype=torch.int64)
    kept.write("1", True, np.array([], np.int64), none, *nothing)
    one = torch.tensor([[0.25, 0.75]])
    kept.write("0", False, np.array([7]), torch.tensor([1]), one, 1 - one)
    assert (kept.has("1"), kept.has("2")) == (True, False)
    kept.merge({"1": "b", "0": "../a"})
    assert parquet.read_table(tmp_path / FILE).to_pylist() == [
        {
            "client": "../a",
            "seen": False,
            "example": 7,
            "split": "test",
            "label": 1,
            "probabilities_personal": [0.25, 0.75],
            "probabilities_global": [0.75, 0.25],
        }
    ]
