"""The method that docs/adding_a_method.md writes step by step keeps the contract."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from knnper.config.loading import load_experiment
from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from knnper.transport.codec import fingerprint, put_together, take_apart
from simulation.catalogue import experiment_catalogue
from strategies.core.method import NEWCOMER, MethodSpec
from strategies.core.records import Update
from strategies.core.task import Task

ROOT = Path(__file__).resolve().parents[2]
MODULE = "strategies.fedprox"
TRAINING = TrainingSettings(num_rounds=1, batch_size=2, learning_rate=0.1)

MakeClient = Callable[..., ClientData]


def listings() -> list[str]:
    page = (ROOT / "docs/adding_a_method.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def spec() -> Iterator[MethodSpec]:
    """Make the documented file importable."""
    method, _, _ = listings()
    module = ModuleType(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, module)
        exec(compile(method, MODULE, "exec"), module.__dict__)
        yield module.SPEC


def test_it_keeps_the_contract(
    spec: MethodSpec,
    normed_task: Callable[[TrainingSettings], Task],
    noisy: MakeClient,
) -> None:
    task = normed_task(TRAINING)
    method = spec.build(task, spec.settings_type(), spec.personalization_type())
    clients = {"a": noisy(6, 4, seed=1), "b": noisy(1, 0, seed=2)}
    before = method.init(tuple(clients), RandomKey(1))

    def one_round() -> Any:
        updates = []
        for name, data in clients.items():
            rng = RandomKey(1).child(name)
            payload = method.broadcast(before, name, rng)
            _, update = method.client_update(payload, None, data, 1, rng)
            assert isinstance(update, Update)
            sent = put_together(method.update_type, take_apart(update))
            updates.append((name, sent))
        return method.aggregate(before, iter(updates))

    state = one_round()
    assert fingerprint(state) == fingerprint(one_round()) != fingerprint(before)
    payload = method.broadcast(state, NEWCOMER, RandomKey(2))
    queries = noisy(5, 0, seed=3).train.images
    for data in (*clients.values(), noisy(0, 0, seed=4)):
        served = method.personalize(payload, None, data, RandomKey(3))(queries)
        torch.testing.assert_close(served.sum(dim=1), torch.ones(5))


def test_it_can_be_chosen_and_set(spec: MethodSpec) -> None:
    known = experiment_catalogue()
    catalogue = dataclasses.replace(
        known,
        method={**known.method, "fedprox": spec.settings_type},
        personalization={**known.personalization, "fedprox": spec.personalization_type},
        check=lambda experiment: (),
    )
    document = {
        "name": "page",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "fedprox", "prox_weight": 0.5},
    }
    chosen = load_experiment(document, catalogue).method.settings
    assert dataclasses.asdict(chosen) == {"prox_weight": 0.5}


def test_its_line_in_the_catalogue(spec: MethodSpec) -> None:
    _, line, _ = listings()
    assert eval(f"{{{line}}}", {"fedprox": sys.modules[MODULE]}) == {"fedprox": spec}


@pytest.mark.parametrize(
    "name", ["test_without_a_pull_it_is_fedavg", "test_two_steps_by_hand"]
)
def test_its_documented_tests_pass(name: str, request: pytest.FixtureRequest) -> None:
    _, _, tests = listings()
    names: dict[str, Any] = {}
    exec(compile(tests, "test_fedprox.py", "exec"), names)
    found = [one for one in names if one.startswith("test_")]
    assert name in found
    assert len(found) == 2
    test = names[name]
    test(*map(request.getfixturevalue, inspect.signature(test).parameters))
