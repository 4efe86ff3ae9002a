"""At which rate every method trains: the round's, for unseen clients the first."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from knnper.experiment import MultiStepSchedule
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.task import Task
from tests.strategies.trained_methods import (
    TRAINING,
    WITH_ROUNDS,
    MakeClient,
    MakeTask,
    Train,
    build,
)

LATER = MultiStepSchedule(milestones=(2,), factor=0.125)
"""From round 2 on, which is the last one, an eighth of the rate."""

LATER_RATE = 0.125 * TRAINING.learning_rate

BEGINNING = (
    "apfl",
    "ditto",
    "fed_mtl",
    "fedbasis",
    "fedbn",
    "fedper",
    "fedrep",
    "l2gd",
    "lg_fedavg",
    "pfedhn",
)
"""What train an unseen client from the start, at the training section's rate."""

ScheduledMethods = tuple[Method, Method, Method]
"""At the constant rate, with the schedule, and at the later rate throughout."""


@pytest.fixture
def three(
    normed_task: MakeTask, noisy: MakeClient
) -> Callable[[str], ScheduledMethods]:
    """Make a method of three trainings that differ in their rates."""
    proxy = noisy(7, 0, seed=2).train
    trainings = (
        TRAINING,
        replace(TRAINING, schedule=LATER),
        replace(TRAINING, learning_rate=LATER_RATE),
    )

    def make(name: str) -> ScheduledMethods:
        def of(task: Task) -> Method:
            return build(METHODS[name], replace(task, proxy=lambda: proxy))

        constant, scheduled, later = (of(normed_task(each)) for each in trainings)
        return constant, scheduled, later

    return make


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_round_is_trained_at_its_own_rate(
    name: str, three: Callable[[str], ScheduledMethods], train: Train
) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))

    def second_round(method: Method) -> list[str]:
        arguments = (payload, run.memory["a"], run.data["a"], 2, RandomKey(3))
        return [fingerprint(one) for one in method.client_update(*arguments)]

    constant, scheduled, later = map(second_round, three(name))
    assert scheduled == later
    assert scheduled != constant


@pytest.mark.parametrize("name", BEGINNING)
def test_an_unseen_client_is_trained_at_the_rate_of_the_first_round(
    name: str,
    three: Callable[[str], ScheduledMethods],
    train: Train,
    noisy: MakeClient,
) -> None:
    run, queries = train(name), noisy(5, 0, seed=10).train.images
    payload = run.method.broadcast(run.state, UNSEEN_CLIENT, RandomKey(2))

    def served(method: Method) -> Tensor:
        return method.personalize(payload, None, run.data["a"], RandomKey(3))(queries)

    constant, scheduled, later = map(served, three(name))
    assert torch.equal(scheduled, constant)
    assert not torch.equal(scheduled, later)
