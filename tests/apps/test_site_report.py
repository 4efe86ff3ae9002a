"""What a run reports of a site is how the site does what it serves."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from knnper.client import install as decision
from knnper.client.state import Accuracy, Gain
from knnper.datastore.prediction import KnnPredictor, Prediction
from knnper.strategies.core import task
from knnper.strategies.core.task import Evaluation
from knnper.strategies.core.task import evaluate as score
from tests.apps.site_grid import experiment
from tests.apps.test_site_run import lead, rows, serving, simulated, three

pytestmark = pytest.mark.usefixtures("inside_a_run")


def test_a_choice_that_loses_is_neither_served_nor_reported(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = (Accuracy(), Gain(-0.5, 0.1, 20))
    monkeypatch.setattr(decision, "estimate", lambda *_: loss)
    settings = experiment(**{"personalization": "{knn_weights: [0.9]}"})
    ran = lead(three(files), settings, tmp_path / "run")
    for name, row in rows(ran).items():
        assert serving(files[name], name).tuned_on.overruled
        assert float(row["knn_weight"]) == 0
        assert row["accuracy"] == row["accuracy_global"]


def test_the_report_of_another_method_is_that_methods(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    settings = experiment(method="{name: fedavg}", personalization="{}")
    ran = lead(three(files), settings, tmp_path / "run")
    expected = rows(simulated(tmp_path / "serial", settings))
    for name, row in rows(ran).items():
        assert row["accuracy"] == expected[name]["accuracy"]
        assert serving(files[name], name).accuracy.knn is not None


def test_a_test_split_is_looked_at_once(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[str]()
    whole = KnnPredictor.explain

    def explain(predictor: KnnPredictor, images: Tensor) -> Prediction:
        looks.append("install")
        return whole(predictor, images)

    def evaluate(*given: Any) -> Evaluation:
        # With the classes' weights it is the test split.
        looks.extend(["run"] * (len(given) == 3))
        return score(*given)

    monkeypatch.setattr(KnnPredictor, "explain", explain)
    monkeypatch.setattr(task, "evaluate", evaluate)
    lead(three(files), experiment(), tmp_path / "run")
    assert looks == ["install"] * 3
