import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.krum import Krum, KrumSettings
from knnper.strategies.multikrum import MultiKrum, MultiKrumSettings
from tests.strategies.small_updates import (
    on_a_line,
    random_updates,
    updates,
)
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

BEFORE = ModelState(torch.zeros(2))


def test_the_mean_of_the_best_by_hand(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings())
    line = ([0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [10.0, 0.0], [100.0, 0.0])
    held = updates(*line, examples=[1, 3, 4, 2, 9])
    # The scores are 10, 5, 13, 130, 17509 (test_krum.py): of two, the models 1 and 0,
    # weighted by examples: 3 · 1 / 4.
    two = MultiKrum(task, MultiKrumSettings(1, 2)).aggregate(BEFORE, iter(held))
    assert two.weights.tolist() == [0.75, 0]
    # Without a number n - f = 4: (0 + 3 + 12 + 20) / 10.
    four = MultiKrum(task, MultiKrumSettings(1)).aggregate(BEFORE, iter(held))
    assert four.weights.tolist() == [3.5, 0]


def test_all_selected_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1))
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abcd")}
    plain, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=1)
    for settings in (MultiKrumSettings(0), MultiKrumSettings(0, 4)):
        found, _ = run_rounds(MultiKrum(task, settings), clients, num_rounds=1)
        torch.testing.assert_close(found.weights, plain.weights, rtol=1e-6, atol=1e-7)


def test_one_selected_is_krum(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    held = random_updates(9, task.model.num_weights, seed=3)
    state = ModelState(task.initial_weights)
    expected = Krum(task, KrumSettings(2)).aggregate(state, iter(held))
    found = MultiKrum(task, MultiKrumSettings(2, 1)).aggregate(state, iter(held))
    assert torch.equal(found.weights, expected.weights)


def test_of_equal_scores_the_first_clients_is_averaged(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings())
    # 0 and 2 have the least score, and -99 and 101 the next: the third is -99.
    held = on_a_line(-99, 101, 0, 2)
    after = MultiKrum(task, MultiKrumSettings(0, 3)).aggregate(BEFORE, iter(held))
    assert after.weights.tolist() == [pytest.approx(-97 / 3), 0]
    one = MultiKrum(task, MultiKrumSettings(0, 1)).aggregate(BEFORE, iter(held))
    assert one.weights.tolist() == [0, 0]


def test_too_few_clients_are_refused(linear_task: MakeTask, key: RandomKey) -> None:
    task = linear_task(TrainingSettings())
    few = MultiKrum(task, MultiKrumSettings(1))
    with pytest.raises(RunError, match=r"at least 5 .* found 4"):
        few.aggregate(BEFORE, iter(on_a_line(*range(4))))
    many = MultiKrum(task, MultiKrumSettings(1, 6))
    message = r"at least 6 .* \(method\.num_selected is 6\), found 5"
    with pytest.raises(RunError, match=message):
        many.aggregate(BEFORE, iter(on_a_line(*range(5))))
    with pytest.raises(RunError, match=message):
        many.init([str(i) for i in range(5)], key)
