from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import MultiStepSchedule
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.qfedavg import (
    QFedAvg,
    QFedAvgSettings,
    QFedAvgState,
    QFedAvgUpdate,
)
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    random_updates,
    run_rounds,
    white,
)


def sent(*clients: tuple[Sequence[float], float]) -> list[tuple[str, QFedAvgUpdate]]:
    """Return updates of models and losses F_k(w), of 1, 2, 3 ... examples."""
    return [
        (chr(ord("a") + i), QFedAvgUpdate(torch.tensor(w), i + 1, 0.5, torch.tensor(f)))
        for i, (w, f) in enumerate(clients)
    ]


TWO = sent(([0.0, 0.0], 2.0), ([1.0, 1.0], 1.0))
BEFORE = QFedAvgState(torch.tensor([1.0, 0.0]), 0)


def test_one_aggregation_by_hand() -> None:
    method = QFedAvg(linear_task(), QFedAvgSettings(1.0, 2.0))
    # Δw_a = 2 ((1, 0) - (0, 0)) = (2, 0), Δ_a = 2 · (2, 0), h_a = 1 · 4 + 2 · 2 = 8.
    # Δw_b = 2 ((1, 0) - (1, 1)) = (0, -2), Δ_b = 1 · (0, -2), h_b = 1 · 4 + 2 · 1 = 6.
    # w = (1, 0) - (4, -2) / 14.
    after = method.aggregate(BEFORE, iter(TWO))
    assert after.weights.tolist() == pytest.approx([1 - 4 / 14, 2 / 14])
    assert after.num_rounds == 1


def test_a_larger_q_listens_to_the_larger_loss() -> None:
    task = linear_task()
    pulls = []
    for q in (0.0, 1.0, 5.0):
        after = QFedAvg(task, QFedAvgSettings(q, 2.0)).aggregate(BEFORE, iter(TWO))
        towards_a, towards_b = (after.weights - BEFORE.weights).abs().tolist()
        pulls.append(towards_a / towards_b)
    # F_a^q / F_b^q.
    assert pulls == pytest.approx([1, 2, 32], rel=1e-4)


def test_the_lipschitz_constant_follows_the_rate() -> None:
    schedule = MultiStepSchedule(milestones=(2,), factor=0.5)
    task = linear_task(learning_rate=0.5, schedule=schedule)
    method = QFedAvg(task, QFedAvgSettings(1.0))
    for num_rounds, lipschitz in ((0, 2.0), (1, 4.0), (7, 4.0)):
        state = replace(BEFORE, num_rounds=num_rounds)
        fixed = QFedAvg(task, QFedAvgSettings(1.0, lipschitz))
        expected = fixed.aggregate(state, iter(TWO))
        after = method.aggregate(state, iter(TWO))
        assert torch.equal(after.weights, expected.weights)
        assert after.num_rounds == num_rounds + 1


def test_the_loss_is_that_of_the_received_model() -> None:
    task = linear_task(learning_rate=0.5, local_steps=5, batch_size=1)
    method, data = QFedAvg(task, QFedAvgSettings()), white([0, 0, 1])
    payload = ModelPayload(torch.tensor([0.25, -0.25]))
    _, update = method.client_update(payload, None, data, 1, KEY)
    # Logits ±¼: -log p is log(1 + e^-½) = 0.474077 for label 0, ½ more for label 1.
    assert float(update.received_loss) == pytest.approx(0.474077 + 0.5 / 3, abs=1e-6)
    _, plain = of_name("fedavg", task).client_update(payload, None, data, 1, KEY)
    assert torch.equal(update.weights, plain.weights)
    assert (update.num_examples, update.train_loss) == (3, plain.train_loss)
    assert update.train_loss != float(update.received_loss)


def test_a_client_without_examples_has_no_loss() -> None:
    method = QFedAvg(linear_task(), QFedAvgSettings())
    payload = ModelPayload(torch.zeros(2))
    _, update = method.client_update(payload, None, white([]), 1, KEY)
    assert float(update.received_loss) == 0


def test_q_0_is_the_plain_mean() -> None:
    task = normed_task()
    held = random_updates(5, task.model.num_weights, seed=1)
    losses = torch.arange(5.0)
    same = [
        (name, QFedAvgUpdate(update.weights, update.num_examples, 0.5, loss))
        for (name, update), loss in zip(held, losses, strict=True)
    ]
    state = QFedAvgState(task.initial_weights, 0)
    averaged = QFedAvg(task, QFedAvgSettings(0.0)).aggregate(state, iter(same)).weights
    mean = (
        torch.stack([update.weights for _, update in held]).double().mean(dim=0).float()
    )
    torch.testing.assert_close(averaged, mean, rtol=1e-6, atol=1e-7)


def test_buffers_are_averaged_whatever_the_losses() -> None:
    task = normed_task(learning_rate=0.1)
    clients = {name: noisy(6, 0, seed=i) for i, name in enumerate("abc")}
    plain, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=1)
    state, _ = run_rounds(QFedAvg(task, QFedAvgSettings(5.0)), clients, num_rounds=1)
    num_parameters = task.model.num_parameters
    # Clients of one size: FedAvg's mean is the plain one.
    buffers = state.weights[num_parameters:]
    torch.testing.assert_close(buffers, plain.weights[num_parameters:])
    assert not torch.allclose(state.weights, plain.weights)


def test_a_loss_below_0_is_none() -> None:
    method = QFedAvg(linear_task(), QFedAvgSettings(0.5))
    below = sent(([0.0, 0.0], 2.0), ([1.0, 1.0], -3.0))
    none = sent(([0.0, 0.0], 2.0), ([1.0, 1.0], 0.0))
    expected = method.aggregate(BEFORE, iter(none)).weights
    assert torch.equal(method.aggregate(BEFORE, iter(below)).weights, expected)


def test_what_cannot_be_computed_names_the_client() -> None:
    method = QFedAvg(linear_task(), QFedAvgSettings(12.0))
    # 10^300 can be computed with, 10^360 cannot. Only b counts, and its large L F^q.
    large = sent(([0.0, 0.0], 2.0), ([1.0, 1.0], 1e25))
    assert method.aggregate(BEFORE, iter(large)).weights.tolist() == [1, 1]
    wild = sent(([0.0, 0.0], 2.0), ([1.0, 1.0], 1e30))
    message = r"largest loss is 1e\+30, of client 'b', and q = 12; lower"
    with pytest.raises(RunError, match=message):
        method.aggregate(BEFORE, iter(wild))
