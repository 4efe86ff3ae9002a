"""SCAFFOLD: rounds by hand, and fine-tuning on top of it."""

import dataclasses
from typing import Any

import pytest
import torch

from knnper.strategies.catalogue import PERSONALIZERS
from knnper.strategies.core.method import Method, changed
from knnper.strategies.core.task import Task
from knnper.strategies.scaffold import (
    Scaffold,
    ScaffoldClientState,
    ScaffoldPayload,
    ScaffoldSettings,
    ScaffoldState,
    ScaffoldUpdate,
)
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    white,
)

SIGMA = 0.6224593  # σ(½), p(0) where the logits are (¼, -¼)


def scaffold_of(task: Task, **settings: Any) -> Method:
    return Scaffold(task, ScaffoldSettings(**settings))


def test_first_round_by_hand() -> None:
    method = scaffold_of(linear_task(learning_rate=0.5))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Without controls yet, y_a = 0 - ½ (-½, ½) = (¼, -¼) and y_b = (-¼, ¼), of mean 0.
    # One step: c_i = (0 - y_i) / (1 · ½), which is the gradient, and the controls
    # cancel in c = ½ (c_a + c_b).
    assert state.weights.tolist() == [0.0, 0.0]
    assert memory["a"].control.tolist() == [-0.5, 0.5]
    assert memory["b"].control.tolist() == [0.5, -0.5]
    assert state.control.tolist() == [0.0, 0.0]


def test_two_rounds_by_size_by_hand() -> None:
    method = scaffold_of(linear_task(learning_rate=1.0), client_weights="size")
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=2)
    # Round 1: y_a = (½, -½), y_b = -y_a, so x = ¾ · ½ - ¼ · ½ = ¼ and c_a = (-½, ½),
    # c_b = -c_a, c = ¾ · (-½) + ¼ · ½ = -¼.
    # Round 2: g_a = σ - 1, and g_a - c_a + c = σ - ¾; g_b = σ, and g_b - c_b + c =
    # σ - ¾ too: both clients step to the same y = ¼ - (σ - ¾).
    expected = 0.25 - (SIGMA - 0.75)
    assert state.weights.tolist() == pytest.approx([expected, -expected], abs=1e-6)
    # c_a ← c_a - c + (x - y_a) / η = -½ + ¼ + σ - ¾ = σ - 1, the gradient at x.
    assert float(memory["a"].control[0]) == pytest.approx(SIGMA - 1, abs=1e-6)
    assert float(memory["b"].control[0]) == pytest.approx(SIGMA, abs=1e-6)
    # c ← -¼ + ¾ (σ - ½) + ¼ (σ - ½) = σ - ¾: the mean of the controls by size.
    assert float(state.control[0]) == pytest.approx(SIGMA - 0.75, abs=1e-6)


@pytest.mark.parametrize(("client_weights", "share"), [("equal", 0.5), ("size", 0.75)])
def test_the_rounds_end_at_the_optimum_of_what_is_weighted(
    client_weights: str, share: float
) -> None:
    """However many local steps: the mean of the losses decides, not the drift."""
    task = linear_task(learning_rate=0.5, local_steps=5)
    method = scaffold_of(task, client_weights=client_weights)
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, _ = run_rounds(method, clients, num_rounds=60)
    assert float(state.weights.softmax(0)[0]) == pytest.approx(share, abs=1e-4)
    drifted, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=60)
    assert float(drifted.weights.softmax(0)[0]) != pytest.approx(0.75, abs=1e-2)


def test_both_controls_correct_a_step() -> None:
    method = scaffold_of(linear_task(learning_rate=1.0))
    payload = ScaffoldPayload(torch.zeros(2), torch.tensor([0.25, 0.0]))
    before = ScaffoldClientState(torch.tensor([0.0, 0.125]))
    after, update = method.client_update(payload, before, white([0]), 1, KEY)
    # g = (-½, ½) at x = 0, so y = -(g - c_i + c) = -(-½ + ¼, ½ - ⅛).
    assert update.weights.tolist() == [0.25, -0.375]
    # c_i⁺ - c_i = (x - y) / (1 · 1) - c = (-¼, ⅜) - (¼, 0), and c_i⁺ is g again.
    assert update.control_change.tolist() == [-0.5, 0.375]
    assert after.control.tolist() == [-0.5, 0.5]


def test_the_control_of_several_steps_is_their_mean_gradient() -> None:
    method = scaffold_of(linear_task(learning_rate=0.5, local_steps=2))
    payload = ScaffoldPayload(torch.zeros(2), torch.zeros(2))
    memory, update = method.client_update(payload, None, white([0]), 1, KEY)
    # Gradients -½ at 0, then σ(½) - 1 at (¼, -¼).
    mean = (-0.5 + SIGMA - 1) / 2
    assert float(memory.control[0]) == pytest.approx(mean, abs=1e-6)
    assert torch.equal(memory.control, update.control_change)


def test_a_step_of_the_server_by_hand() -> None:
    method = scaffold_of(linear_task(), global_learning_rate=0.25)
    state = ScaffoldState(torch.tensor([4.0, 0.0]), torch.ones(2), num_clients=8)
    trained, changes = torch.tensor([8.0, -8.0]), [[1.0, 0.0], [3.0, -2.0]]
    updates = [
        (str(i), ScaffoldUpdate(trained, 10**i, 0.5, torch.tensor(change)))
        for i, change in enumerate(changes)
    ]
    # 2 of 8 replied; whatever their sizes, c moves by 2/8 of the mean (2, -1).
    after = method.aggregate(state, iter(updates))
    assert after.control.tolist() == [1.5, 0.75]
    assert after.num_clients == 8
    # 4 + ¼ (8 - 4) = 5 and 0 + ¼ (-8 - 0) = -2.
    assert after.weights.tolist() == [5, -2]


def test_without_controls_it_is_fedavg() -> None:
    task = normed_task(batch_size=3, learning_rate=0.1)
    plain = of_name("fedavg", task)
    method = scaffold_of(task, client_weights="size")

    def forget(*arguments: Any) -> tuple[ScaffoldClientState, ScaffoldUpdate]:
        memory, update = method.client_update(*arguments)
        zero = torch.zeros_like(memory.control)
        return (
            ScaffoldClientState(zero),
            dataclasses.replace(update, control_change=zero),
        )

    without_controls = changed(method, client_update=forget)
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(plain, clients, num_rounds=3)
    state, _ = run_rounds(without_controls, clients, num_rounds=3)
    assert torch.equal(state.weights, expected.weights)
    corrected, _ = run_rounds(method, clients, num_rounds=3)
    assert not torch.equal(corrected.weights, expected.weights)


def test_a_client_without_steps_keeps_its_control() -> None:
    task = linear_task()
    nothing = white([])
    payload = ScaffoldPayload(torch.ones(2), torch.tensor([1.0, 2.0]))
    before = ScaffoldClientState(torch.tensor([3.0, 4.0]))
    after, update = scaffold_of(task).client_update(payload, before, nothing, 1, KEY)
    assert torch.equal(after.control, before.control)
    assert torch.equal(update.control_change, torch.zeros(2))


def test_the_global_model_is_trained_on_without_controls() -> None:
    task = linear_task(learning_rate=0.5)
    on_top = PERSONALIZERS["fine_tuning"]
    tuned = on_top(task, Scaffold(task, ScaffoldSettings()), on_top.settings_type())
    far = torch.tensor([100.0, -100.0])
    payload = ScaffoldPayload(torch.zeros(2), control=far)
    served = one_model_of(tuned, payload, None, white([0]))
    # A plain step of ½ from 0: the gradient is (-½, ½), whatever the controls are.
    assert served.weights.tolist() == [0.25, -0.25]
    assert not tuned.personalizes_by_inference
