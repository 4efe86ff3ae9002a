"""Settings that a method cannot bear: which of them, and what would do."""

from typing import Any

import pytest

from knnper.errors import ConfigError, Problem
from knnper.experiment import (
    BufferedTiming,
    TrainingSettings,
)
from knnper.settings import Choice, Settings, parse_settings
from knnper.strategies.catalogue import METHODS, PERSONALIZERS
from tests.strategies.method_checks import problems_of
from tests.strategies.tiny import linear_task, normed_task

HESSIAN = {"variant": "hessian_free"}
TWO_GROUPS = {"groups": {"x": ("a", "b"), "y": ("b", "c")}}
BY_LABEL = {"domain": "label"}
ENTRIES = {**METHODS, **PERSONALIZERS}


def found_in(
    name: str, settings: dict[str, Any], training: dict[str, Any]
) -> list[Problem]:
    entry = ENTRIES[name]
    chosen = entry.settings_type(**settings)
    return list(problems_of(entry, chosen, TrainingSettings(**training)))


@pytest.mark.parametrize(
    ("name", "settings", "training", "place", "hint"),
    [
        (
            "agnostic",
            {**BY_LABEL, "groups": {"x": ("a",)}},
            {},
            "method.groups",
            "domain: label",
        ),
        ("agnostic", TWO_GROUPS, {}, "method.groups", "found b more than once"),
        (
            "per_fedavg",
            HESSIAN,
            {"precision": "bfloat16"},
            "training.precision",
            "found bfloat16, expected float32",
        ),
        ("pfedgp", {}, {"batch_size": 1}, "training.batch_size", "found 1, expected 2"),
        (
            "pfedme",
            {"prox_weight": 20.0, "inner_learning_rate": 0.2},
            {},
            "method.inner_learning_rate",
            "2 / prox_weight = 0.1",
        ),
        ("scaffold", {}, {"momentum": 0.9}, "training.momentum", "found 0.9, expected"),
        (
            "fedbasis",
            {},
            {"timing": BufferedTiming()},
            "training.timing",
            "warm_start_fraction of 0",
        ),
        (
            "fedproto",
            {},
            {"timing": BufferedTiming(server_rate=0.5)},
            "training.timing",
            "server_rate of 0.5, expected 0 and 1",
        ),
        (
            "heterofl",
            {"mask_labels": True},
            {"compression": Choice("sign", Settings())},
            "method.mask_labels",
            "found true with training.compression",
        ),
    ],
)
def test_what_goes_together_badly(
    name: str, settings: dict[str, Any], training: dict[str, Any], place: str, hint: str
) -> None:
    (problem,) = found_in(name, settings, training)
    assert problem.place == place
    assert hint in problem.message


@pytest.mark.parametrize(
    ("name", "settings", "training"),
    [
        ("agnostic", BY_LABEL, {}),
        ("per_fedavg", {"variant": "first_order"}, {"precision": "bfloat16"}),
        ("per_fedavg", HESSIAN, {}),
        ("pfedgp", {}, {"batch_size": 2}),
        ("pfedme", {}, {}),
        ("pfedme", {"prox_weight": 0.0}, {}),
        ("scaffold", {}, {"momentum": 0.0}),
    ],
)
def test_what_goes_together_well(
    name: str, settings: dict[str, Any], training: dict[str, Any]
) -> None:
    assert found_in(name, settings, training) == []


@pytest.mark.parametrize(
    ("name", "field", "value", "hint"),
    [
        ("agnostic", "groups", {"x": "a"}, "a list"),
        ("clustered_fl", "client_norm_tolerance", float("inf"), "a finite number"),
        ("ditto", "prox_weights", [0.5, 1.0, 0.5], "expected values that all differ"),
        ("ditto", "prox_weights", [], "a list of at least 1"),
        ("mapper", "interpolation_weights", [0.5, 0.5], "values that all differ"),
        ("fedtrimmedavg", "trimmed_fraction", 0.5, "less than 0.5"),
    ],
)
def test_what_is_out_of_range(name: str, field: str, value: Any, hint: str) -> None:
    problems: list[Problem] = []
    parse_settings(ENTRIES[name].settings_type, {field: value}, "method", problems)
    (problem,) = problems
    assert problem.place.startswith(f"method.{field}")
    assert hint in problem.message


@pytest.mark.parametrize(
    ("name", "settings", "place", "hint"),
    [
        ("fedas", {}, "method.name", "no weight would be shared"),
        ("fedbabu", {}, "method.name", "no weight would be shared"),
        ("fedbn", {}, "method.name", "a model without BatchNorm"),
        (
            "fedper",
            {"num_personal_layers": 2},
            "method.num_personal_layers",
            "found 2, expected at most 1",
        ),
        ("fedpac", {}, "method.name", "expected a body too"),
        ("fedrep", {}, "method.name", "no weight would be shared"),
        ("gpfl", {}, "method.name", "no weight would be shared"),
        ("pfedfda", {}, "method.name", "no weight would be shared"),
        (
            "lg_fedavg",
            {"num_local_layers": 5},
            "method.num_local_layers",
            "found 5, expected at most 1",
        ),
    ],
)
def test_what_a_model_cannot_bear(
    name: str, settings: dict[str, Any], place: str, hint: str
) -> None:
    task = linear_task() if place == "method.name" else normed_task()
    with pytest.raises(ConfigError) as caught:
        METHODS[name](task, METHODS[name].settings_type(**settings))
    (problem,) = caught.value.problems
    assert problem.place == place
    assert hint in problem.message
