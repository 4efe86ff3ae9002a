"""What is told of a client is how it does what it serves."""

import dataclasses
from pathlib import Path

import pytest

from knnper.client import install as decision
from knnper.client.state import Accuracy, Gain
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import ModelError
from knnper.strategies.core.predictors import ModelPredictor, evaluate
from knnper.strategies.knn_per import memorize
from tests.client.state.small_site import (
    NAME,
    drawn,
    new_site_state,
    site,
    small_model,
)

MODEL = small_model()
DATA = site(30, 20, 15)


def test_figures_are_those_of_the_simulations_client(tmp_path: Path) -> None:
    decided = new_site_state(tmp_path).install(MODEL, DATA, took_part=True)
    predictor = memorize(
        ModelPredictor(MODEL.task, MODEL.weights),
        MODEL.spec.num_classes,
        DATA.client_data(),
        MODEL.card.memory,
        RandomKey(MODEL.card.seed).child("personalize", NAME),
    )
    test = DATA.test.examples
    assert decided.mixed == evaluate(predictor, test)
    alone = dataclasses.replace(predictor, knn_weight=0.0)
    assert decided.global_model == evaluate(alone, test)
    only = dataclasses.replace(predictor, knn_weight=1.0)
    assert decided.knn is not None
    assert decided.knn.num_correct == evaluate(only, test).num_correct
    assert decided.chosen == predictor.describe()
    assert decided.serving.accuracy.mixed == decided.mixed.accuracy


def test_a_choice_that_is_overruled_is_reported_as_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = (Accuracy(), Gain(-0.5, 0.1, 20))
    monkeypatch.setattr(decision, "estimate", lambda *_: loss)
    decided = new_site_state(tmp_path).install(
        small_model(knn_weights=[0.9]), DATA, took_part=True
    )
    assert decided.serving.tuned_on.overruled
    assert decided.chosen["knn_weight"] == decided.serving.knn_weight == 0
    assert decided.mixed == decided.global_model


def test_all_that_the_memory_holds_is_reported(tmp_path: Path) -> None:
    site_state = new_site_state(tmp_path)
    site_state.install(MODEL, DATA, took_part=True)
    fewer = dataclasses.replace(DATA, train=drawn("train", 10))
    decided = site_state.install(MODEL, fewer, took_part=True)
    assert decided.chosen["num_stored"] == 50


def test_without_a_test_split_nothing_is_known(tmp_path: Path) -> None:
    decided = new_site_state(tmp_path).install(MODEL, site(), took_part=True)
    assert decided.mixed.num_examples == 0
    assert decided.serving.accuracy.measured_on == "validation"


def test_a_damaged_model_is_mended_by_installing_it_again(tmp_path: Path) -> None:
    site_state = new_site_state(tmp_path)
    site_state.install(MODEL, DATA, took_part=True)
    folder = site_state.places.model(MODEL.fingerprint)
    (folder / "model.json").write_text("{}")
    with pytest.raises(ModelError, match="get it again: knnper site onboard"):
        site_state.load(MODEL.fingerprint)
    site_state.install(MODEL, DATA, took_part=True)
    assert site_state.load(MODEL.fingerprint).fingerprint == MODEL.fingerprint
