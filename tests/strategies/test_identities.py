"""Settings that make a method another one, in every bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from knnper.experiment import TrainingSettings
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from tests.strategies.tiny import (
    KEY,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
)

EVERYTHING = TrainingSettings(
    num_rounds=4, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)
ONE_BASIS = {"num_bases": 1, "major_basis": False, "personal_classifier": False}
CENTRAL = {"interpolation_weights": (0.0,), "warm_start_fraction": 0.0}
NO_GAIN = {"domain_learning_rate": 0.0}

SERVED_ALIKE: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("agnostic", NO_GAIN, {"domain_learning_rate": 1.0}),
    ("agnostic", {**NO_GAIN, "domain": "label"}, None),
    ("agnostic", {**NO_GAIN, "groups": {"few": ("a", "c")}}, None),
    ("apfl", {"mixing_weight": 0.0}, None),
    ("clustered_fl", {"mean_norm_tolerance": 1e6, "client_norm_tolerance": None}, None),
    ("clustered_fl", {"mean_norm_tolerance": 0.0, "client_norm_tolerance": 0.0}, None),
    ("fedala", {"aggregation_learning_rate": 0.0}, {}),
    ("fedattn", {"warm_up_fraction": 1.0, "bias_prox_weight": 5.0}, {}),
    ("fedavgm", {"server_learning_rate": 1.0, "server_momentum": 0.0}, {}),
    ("fedbasis", {**ONE_BASIS, "warm_start_fraction": 0.0}, None),
    ("fedbasis", {**ONE_BASIS, "warm_start_fraction": 0.3}, None),
    ("fedbasis", {**ONE_BASIS, "coordinate_descent": False}, None),
    ("feddbe", {"mean_weight": 0.0, "bias_learning_rate": 0.0}, {"mean_weight": 0.0}),
    ("fedem", {"num_components": 1}, None),
    ("fedper", {"num_personal_layers": 0}, {}),
    ("fedprox", {"prox_weight": 0.0}, {"prox_weight": 0.1}),
    ("hypcluster", {"num_clusters": 1}, None),
    ("lg_fedavg", {"num_local_layers": 0}, {}),
    ("mapper", CENTRAL, {**CENTRAL, "interpolation_weights": (0.5,)}),
]
"""A method, its settings, and others of which the model must not be FedAvg's."""

TRAINED_ALIKE: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    *(
        ("apfl", {"mixing_weight": weight, "adaptive": adaptive}, None)
        for weight in (0.0, 0.5, 1.0)
        for adaptive in (False, True)
    ),
    ("ditto", {}, None),
    ("fedrod", {"prior_exponent": 0.0}, {}),
    # One inner step of the rate 1 / λ.
    (
        "pfedme",
        {"prox_weight": 15, "inner_steps": 1, "inner_learning_rate": 1 / 15},
        {},
    ),
]


def everything_task() -> Task:
    """Return a task with dropout, BatchNorm, momentum and weight decay."""
    task = normed_task(EVERYTHING)
    features = task.model.module.features
    assert isinstance(features, nn.Sequential)
    features.append(nn.Dropout(0.5))
    return task


def global_model(state: Any) -> Tensor:
    for field in ("models", "centers", "components"):
        if hasattr(state, field):
            (model,) = getattr(state, field)
            return torch.as_tensor(model)
    return torch.as_tensor(state.weights)


@pytest.mark.parametrize(
    ("name", "settings", "others", "serves"),
    [(*row, True) for row in SERVED_ALIKE] + [(*row, False) for row in TRAINED_ALIKE],
)
def test_it_is_fedavg(
    name: str, settings: dict[str, Any], others: dict[str, Any] | None, serves: bool
) -> None:
    task, num_rounds = everything_task(), EVERYTHING.num_rounds
    clients = {client: noisy(5 + i, 2, seed=i) for i, client in enumerate("abc")}
    plain, _ = run_rounds(of_name("fedavg", task), clients, num_rounds)
    method = of_name(name, task, **settings)
    state, memory = run_rounds(method, clients, num_rounds)
    assert torch.equal(global_model(state), plain.weights)
    images = clients["a"].validation.images
    for known_as, kept in (("a", memory["a"]), (UNSEEN_CLIENT, None)) if serves else ():
        payload = method.broadcast(state, known_as, KEY)
        rows = method.personalize(payload, kept, clients["a"], KEY)(images)
        assert torch.equal(rows, task.probabilities(plain.weights, images))
    if others is not None:
        other, _ = run_rounds(of_name(name, task, **others), clients, num_rounds)
        assert not torch.equal(global_model(other), plain.weights)


@pytest.mark.parametrize(
    ("name", "alone", "mixed"),
    [
        ("fed_mtl", {"prox_weight": 0.0}, {"prox_weight": 0.5}),
        ("fedproto", {"prototype_weight": 0.0}, {"prototype_weight": 0.5}),
        (
            "l2gd",
            {"prox_weight": 5.0, "aggregation_probability": 0.0},
            {"prox_weight": 5.0, "aggregation_probability": 0.6},
        ),
    ],
)
def test_it_is_local(name: str, alone: dict[str, Any], mixed: dict[str, Any]) -> None:
    task = normed_task(EVERYTHING)
    clients = {"a": noisy(7, 2, seed=1), "b": noisy(4, 2, seed=2)}
    num_rounds = EVERYTHING.num_rounds
    model, pulled = (
        run_rounds(of_name(name, task, **each), clients, num_rounds)[1]
        for each in (alone, mixed)
    )
    for client, data in clients.items():
        payload = ModelPayload(task.initial_weights)
        local = one_model_of(of_name("local", task), payload, None, data)
        served = local.without_validation()
        assert torch.equal(model[client].weights, served.weights)
        assert not torch.equal(pulled[client].weights, served.weights)
