"""Sweeps and comparisons find users' code beside their file, as `simulate` does."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import knnper
from knnper.errors import ConfigError
from knnper.simulation.batches.choice import CHOSEN
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.runner import run_batch
from knnper.simulation.batches.sweep import read_sweep
from knnper.simulation.batches.tables import rows_of
from knnper.yaml_text import dump_yaml
from tests.own.test_own_code import METHOD
from tests.simulation.batches.small_sweep import ignore

# One thing of each section that can name users' code.
CODE = """
import numpy as np
import torch
from torch import nn

def images(count: int = 60):
    rng = np.random.default_rng(0)
    return {"x": rng.integers(0, 255, (count, 8, 8), np.uint8),
            "y": np.arange(count) % 3}

def alternate(labels, num_clients: int = 2):
    return [range(n, len(labels), num_clients) for n in range(num_clients)]

class Net(nn.Module):
    def __init__(self, num_classes: int, hidden: int = 4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.out(self.body(x))

def smoothed(logits, labels):
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)

class Slow(torch.optim.SGD):
    def __init__(self, params, lr: float):
        super().__init__(params, lr / 2)

def hits(labels, probabilities):
    return float((probabilities.argmax(axis=1) == labels).mean())
"""
BASE: dict[str, Any] = {
    "data": {"name": "mine:images"},
    "partition": {"name": "mine:alternate"},
    "model": {"name": "mine:Net"},
    "training": {
        "num_rounds": 1,
        "optimizer": {"name": "mine:Slow"},
        "loss": {"name": "mine:smoothed"},
    },
    "run": {"metrics": ["mine:hits"]},
}
SECTIONS = {
    "data",
    "partition",
    "model",
    "method",
    "training.optimizer",
    "training.loss",
    "run.metrics.hits",
}
METHOD_OF_MINE = {"method": {"name": "halfway:Half"}}


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with users' code, which is not the working folder."""
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "halfway.py").write_text(METHOD)
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield tmp_path
    os.chdir(before)


def write(path: Path, document: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_yaml(dict(document)))
    return path


def sweep_file(folder: Path, **changes: Any) -> Path:
    document = {
        "name": "own",
        "base": {**BASE, **METHOD_OF_MINE},
        "grid": {"model.hidden": [2, 4]},
        "seeds": [1],
        "y": "hits_mean",
        **changes,
    }
    return write(folder / "sweep.yaml", document)


def comparison_file(folder: Path, **changes: Any) -> Path:
    rows = {"mean": {"method": {"name": "fedavg"}}, "mine": METHOD_OF_MINE}
    document = {
        "name": "own",
        "base": BASE,
        "rows": rows,
        "reference": "mean",
        "metric": "hits",
        "seeds": [1],
        **changes,
    }
    return write(folder / "comparison.yaml", document)


def test_sweep_runs_code_beside_its_file(folder: Path) -> None:
    sweep = read_sweep(sweep_file(folder))
    assert {*sweep.experiments[0].own()} == SECTIONS
    assert {experiment.own_code for experiment in sweep.experiments} == {str(folder)}
    outcomes = run_batch(sweep, folder / "out", 1, ignore)
    for row in rows_of(sweep, outcomes):
        assert row.estimates["seen.hits_mean"].mean is not None
    # A run that a sweep made is read from Python like any other.
    run = knnper.Run(outcomes[0].runs[1])
    assert type(run.model()).__name__
    assert run.experiment.own_code == str(folder)


def test_chosen_point_is_tested_with_the_same_code(folder: Path) -> None:
    sweep = read_sweep(sweep_file(folder), ["evaluate_on=validation"])
    outcomes = run_batch(sweep, folder / "out", 1, ignore)
    write_batch(sweep, outcomes, rows_of(sweep, outcomes), folder / "out")
    chosen = read_sweep(folder / "out" / CHOSEN)
    assert {*chosen.experiments[0].own()} == SECTIONS


def test_comparison_runs_code_beside_its_file(folder: Path) -> None:
    comparison = read_comparison(comparison_file(folder))
    assert [point.title for point in comparison.points] == ["FedAvg", "Half way"]
    outcomes = run_batch(comparison, folder / "out", 1, ignore)
    for row in rows_of(comparison, outcomes):
        assert row.estimates["seen.hits_weighted"].mean is not None


def test_code_is_beside_the_experiment_that_a_sweep_names(folder: Path) -> None:
    write(folder / "experiment.yaml", {"name": "one", **BASE, **METHOD_OF_MINE})
    path = sweep_file(folder / "sweeps", base=None, experiment="../experiment.yaml")
    (first, _) = read_sweep(path).experiments
    assert Path(first.own_code or "").resolve() == folder
    # An experiment without code leaves it to the sweep to bring some.
    plain = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedavg"},
    }
    write(folder / "plain/experiment.yaml", {"name": "one", **plain})
    path = sweep_file(
        folder,
        base=None,
        experiment="plain/experiment.yaml",
        variants={"mine": METHOD_OF_MINE},
        grid={"training.num_rounds": [1]},
        y="accuracy_mean",
    )
    (first,) = read_sweep(path).experiments
    assert first.own_code == str(folder)


def test_code_is_beside_the_comparison_that_is_extended(folder: Path) -> None:
    comparison_file(folder)
    path = write(
        folder / "more/extended.yaml",
        {"name": "more", "extends": "../comparison.yaml", "seeds": [2]},
    )
    experiment = read_comparison(path).experiments[0]
    assert Path(experiment.own_code or "").resolve() == folder


@pytest.mark.parametrize("is_set", [False, True])
def test_own_code_names_a_folder_from_the_file(folder: Path, is_set: bool) -> None:
    (folder / "code").mkdir()
    for name in ("mine.py", "halfway.py"):
        (folder / name).rename(folder / "code" / name)
    with pytest.raises(ConfigError, match="found no module 'mine'"):
        read_comparison(comparison_file(folder))
    changes = ["own_code=code"] if is_set else []
    base = BASE if is_set else {**BASE, "own_code": "code"}
    read_comparison(comparison_file(folder, base=base), changes)
    read_sweep(sweep_file(folder, base={**base, **METHOD_OF_MINE}), changes)


def test_own_personalisation_goes_on_top_of_every_row(folder: Path) -> None:
    (folder / "top.py").write_text(
        "import knnper\n\nclass Same(knnper.Personalizer):\n"
        '    """Changes nothing."""\n\n    title = "Same"\n'
    )
    path = comparison_file(folder, each_also_with={"name": "top:Same"})
    titles = [point.title for point in read_comparison(path).points]
    assert titles == ["FedAvg", "Half way", "FedAvg + Same", "Half way + Same"]
