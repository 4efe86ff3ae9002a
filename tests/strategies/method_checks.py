"""What the tests of several methods do with a method or its entry in a catalogue."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.errors import ConfigError, Problem
from knnper.experiment import (
    Choice,
    Experiment,
    RunSettings,
    Settings,
    TrainingSettings,
    load_experiment,
)
from knnper.seeding import RandomKey
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.task import MixturePredictor, Task
from knnper.strategies.core.training import local_sgd


def problems_of(
    spec: type[Method], settings: Settings, training: TrainingSettings | None = None
) -> Sequence[Problem]:
    """Return what an entry finds in an experiment with these settings of its own."""
    anything, own = Choice("any", Settings()), Choice("own", settings)
    is_method = not issubclass(spec, Personalizer)
    experiment = Experiment(
        name="test",
        data=anything,
        partition=anything,
        model=anything,
        training=training or TrainingSettings(),
        method=own if is_method else anything,
        personalization=anything if is_method else own,
        run=RunSettings(),
    )
    return spec.check(settings, experiment)


def mixture_served(
    method: Method, weights: Tensor, data: ClientData
) -> MixturePredictor:
    """Return what an unseen client is served of one model that is sent to it."""
    payload = ModelPayload(weights)
    predictor = method.personalize(payload, None, data, RandomKey(6))
    assert isinstance(predictor, MixturePredictor)
    return predictor


def count_trainings(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """Return a list that grows with each local training of a method's module."""
    sizes: list[int] = []

    def counted(task: Task, weights: Tensor, *rest: Any, **given: Any) -> Any:
        sizes.append(len(rest[0]))
        return local_sgd(task, weights, *rest, **given)

    monkeypatch.setattr(module, "local_sgd", counted)
    return sizes


def trained_with_the_keys_of_local(
    method: Method, task: Task, clients: Mapping[str, ClientData], key: RandomKey
) -> dict[str, Tensor]:
    """Return the model that each client keeps after all rounds."""
    state, memory = method.init(tuple(clients), key), dict[str, ModelState]()
    for server_round in range(1, task.training.num_rounds + 1):
        updates, rng = [], key.child("round", server_round)
        for name, data in clients.items():
            payload = method.broadcast(state, name, rng)
            memory[name], update = method.client_update(
                payload, memory.get(name), data, server_round, rng
            )
            updates.append((name, update))
        state = method.aggregate(state, iter(updates))
    return {name: kept.weights for name, kept in memory.items()}


def document(
    method: str | dict[str, Any] = "fedavg",
    personalization: str | dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """Return an experiment on digits, of two clients if ``partition`` is not given."""
    return {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": method} if isinstance(method, str) else method,
        **({} if personalization is None else {"personalization": personalization}),
        **sections,
    }


def refused(
    document: dict[str, Any], place: str, hint: str, catalogue: Any = None
) -> None:
    """Assert that an experiment has one problem, in this place, of these words."""
    with pytest.raises(ConfigError, match=hint) as caught:
        load_experiment(document, catalogue or experiment_catalogue())
    assert [problem.place for problem in caught.value.problems] == [place]
