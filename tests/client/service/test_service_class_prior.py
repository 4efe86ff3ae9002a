"""What the service tells of a global model that is adapted to the stored classes."""

from dataclasses import replace
from pathlib import Path

import pytest

from knnper.datastore.prediction import ClassPrior, ClassPriorSettings
from tests.client.service.small_service import asking, small_served, some_inputs

QUESTION = {"inputs": some_inputs(1, seed=5).tolist()}


def test_an_answer_names_what_is_mixed(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store", count=7)
    prior = ClassPrior(ClassPriorSettings((1.0,)))
    served.settings = replace(served.settings, knn_weight=0.25, class_prior=prior)
    with asking(served) as client:
        (found,) = client.post("/predict", json=QUESTION).json()["predictions"]
        assert client.get("/info").json()["class_prior"]

    for name, share in found["probabilities"].items():
        adapted = found["adapted_probabilities"][name]
        knn = found["knn_probabilities"][name]
        assert share == pytest.approx(0.25 * knn + 0.75 * adapted, abs=1e-6)
    # Of seven examples three are cats, and two each of the others.
    grown = {
        name: found["adapted_probabilities"][name] / share
        for name, share in found["global_probabilities"].items()
    }
    assert grown["cat"] > grown["dog"] == pytest.approx(grown["eel"], rel=1e-4)


def test_without_a_class_prior_there_is_null(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        (found,) = client.post("/predict", json=QUESTION).json()["predictions"]
        assert found["adapted_probabilities"] is None
        assert not client.get("/info").json()["class_prior"]
