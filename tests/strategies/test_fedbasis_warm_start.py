"""How FedBasis comes to its first bases."""

from dataclasses import replace

import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import TrainingSettings
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fedbasis import (
    BasesUpdate,
    FedBasis,
    FedBasisSettings,
    num_warm_rounds,
)
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

TWO = FedBasisSettings(num_bases=2, major_basis=False, blocks="whole")
WITH_EVERYTHING = TrainingSettings(
    num_rounds=6, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)


def test_the_warm_start_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(num_rounds=3, learning_rate=1.0))
    settings = replace(TWO, major_basis=True)
    clients = {"a": white([0, 0]), "b": white([0]), "c": white([1])}
    state, _ = run_rounds(FedBasis(task, settings), clients, num_rounds=1)
    # From 0, a and b step to (½, -½) and c to (-½, ½): two clusters, whose means are
    # these; the major basis is that of all, ¾ · ½ - ¼ · ½ = ¼.
    major, *bases = [model.tolist() for model in state.models]
    assert major == [0.25, -0.25]
    assert sorted(bases) == [[-0.5, 0.5], [0.5, -0.5]]


def test_the_warm_start_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(WITH_EVERYTHING)
    settings = FedBasisSettings(num_bases=2, warm_start_fraction=0.5)
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    assert num_warm_rounds(task, settings) == 3
    for num_rounds in (2, 3):
        plain, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds)
        state, _ = run_rounds(FedBasis(task, settings), clients, num_rounds)
        assert torch.equal(state.models[0], plain.weights)
        assert len(state.models) == (1 if num_rounds == 2 else 3)
    after, _ = run_rounds(FedBasis(task, settings), clients, num_rounds=4)
    assert len(after.models) == 3
    assert not torch.equal(after.models[1], after.models[2])


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.001, 1), (0.24, 1), (0.5, 3)]
)
def test_a_warm_start_is_a_round_at_least(
    linear_task: MakeTask, fraction: float, expected: int
) -> None:
    task = linear_task(TrainingSettings(num_rounds=6))
    settings = replace(TWO, warm_start_fraction=fraction)
    assert num_warm_rounds(task, settings) == expected


def test_the_warm_start_goes_on_while_too_few_reply(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings(num_rounds=10))
    method = FedBasis(task, TWO)
    state = method.init(["a", "b"], RandomKey(0))

    def update(value: float) -> BasesUpdate:
        return BasesUpdate((torch.full((2,), value),), 1, 0.5)

    for server_round in range(1, 5):
        state = method.aggregate(state, iter([("a", update(server_round))]))
        assert [model.tolist() for model in state.models] == [[server_round] * 2]
    both = [("a", update(1.0)), ("b", update(3.0))]
    state = method.aggregate(state, iter(both))
    assert sorted(model.tolist() for model in state.models) == [[1, 1], [3, 3]]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_bases_do_not_depend_on_the_order_of_replies(
    linear_task: MakeTask, seed: int
) -> None:
    task = linear_task(TrainingSettings(num_rounds=1))
    method = FedBasis(task, FedBasisSettings(num_bases=3))
    # Points at even distances, which k-means divides as its first centre has it.
    models = [torch.tensor([float(at), 0.1 * at**2]) for at in range(9)]
    updates = [
        (f"client {at}", BasesUpdate((model,), 1 + at % 4, 0.5))
        for at, model in enumerate(models)
    ]
    start = method.init([client for client, _ in updates], RandomKey(seed))
    expected = fingerprint(method.aggregate(start, iter(updates)))
    shuffled = updates[::2] + updates[1::2]
    for others in (updates[::-1], shuffled):
        assert fingerprint(method.aggregate(start, iter(others))) == expected


@pytest.mark.parametrize(("num_clients", "fits"), [(4, False), (5, True)])
def test_more_bases_than_replies_are_refused(
    linear_task: MakeTask, num_clients: int, fits: bool
) -> None:
    task = linear_task(TrainingSettings(participation=0.5))
    method = FedBasis(task, FedBasisSettings(num_bases=3))
    names = [str(number) for number in range(num_clients)]
    if fits:
        assert len(method.init(names, RandomKey(0)).models) == 1
        return
    with pytest.raises(RunError, match=r"found 4 clients of which 0\.5 take part"):
        method.init(names, RandomKey(0))
    without = FedBasis(task, FedBasisSettings(num_bases=3, warm_start_fraction=0.0))
    assert len(without.init(names, RandomKey(0)).models) == 4


def test_without_a_warm_start_the_bases_are_drawn(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    settings = FedBasisSettings(num_bases=2, warm_start_fraction=0.0)
    first, second, third = FedBasis(task, settings).init([], RandomKey(0)).models
    assert torch.equal(first, task.initial_weights)
    assert not torch.equal(second, first)
    assert not torch.equal(third, second)
