"""The listing on the methods page makes a prior of a run's table of clients."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from knnper.experiment import load_experiment
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.knn_per import KnnSettings

PAGE = "docs/methods/knn_per.md"
CLIENTS = """client,num_train,num_validation,knn_weight
a,8,2,0.1
b,80,20,0.5
c,0,0,0.0
"""


def test_the_listing_makes_a_prior(
    tmp_path: Path,
    listings: Callable[[str, str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/clients.csv").write_text(CLIENTS)
    (listing,) = listings(PAGE, "python")
    names: dict[str, Any] = {}
    exec(compile(listing, PAGE, "exec"), names)
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
