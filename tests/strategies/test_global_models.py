"""Which methods end with one trained model, for export and for sites to keep."""

import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import NEWCOMER
from tests.strategies.tiny import noisy, normed_task, of_name, run_rounds

ENDS_WITH_ONE = [name for name in METHODS if METHODS[name].ends_with_global_model]
TRAINING = TrainingSettings(num_rounds=2, batch_size=4, learning_rate=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_served_as_it_is_can_be_exported(name: str) -> None:
    if of_name(name, normed_task(TRAINING)).serves_global_model:
        assert METHODS[name].ends_with_global_model
    if METHODS[name].ends_with_global_model:
        assert METHODS[name].reference_title is not None


@pytest.mark.parametrize("name", ENDS_WITH_ONE)
def test_a_newcomer_is_sent_the_model_that_the_server_has(name: str) -> None:
    method = of_name(name, normed_task(TRAINING))
    clients = {client: noisy(6, 4, seed=i) for i, client in enumerate("abc")}
    state, _ = run_rounds(method, clients, TRAINING.num_rounds)
    payload = method.broadcast(state, NEWCOMER, RandomKey(2))
    assert torch.equal(payload.weights, state.weights)


def test_those_that_share_no_metrics_stay_away_from_two() -> None:
    found = [name for name, spec in METHODS.items() if spec.needs_metrics]
    assert found == ["agnostic", "qfedavg"]
