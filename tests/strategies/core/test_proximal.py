from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd, pull
from tests.strategies.trained_methods import MakeClient

NUMBERS = st.floats(-5, 5, width=32)
MakeTask = Callable[[TrainingSettings], Task]


def pulled(
    gradient: Tensor,
    parameters: Tensor,
    center: Tensor,
    weight: float,
    rate: float,
    *,
    decay: float = 0.0,
    where: Tensor | None = None,
) -> Tensor:
    changed = gradient.clone()
    pull(center, weight, rate, decay, where)(changed, parameters)
    return changed


def test_a_step_by_hand() -> None:
    # (g + λ (p - c)) / (1 + η λ) = (2 + ½ · (3 - 1)) / (1 + 2 · ½) = 1.5, and the step
    # ends at 3 - 2 · 1.5 = 0 = (p - η g + η λ c) / (1 + η λ) = (3 - 4 + 1) / 2.
    found = pulled(
        torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([1.0]), 0.5, 2
    )
    assert found.tolist() == [1.5]


def test_a_step_with_weight_decay_by_hand() -> None:
    # With d = ¼ the loss has the slope 2 + ¼ · 3 = 2.75, and the step is along
    # (2.75 + ½ · (3 - 1)) / 2 = 1.875, of which SGD adds ¼ · 3 itself.
    g, p, c = (torch.tensor([value]) for value in (2.0, 3.0, 1.0))
    assert pulled(g, p, c, 0.5, 2, decay=0.25).tolist() == [1.875 - 0.75]


@settings(max_examples=30, deadline=None)
@given(
    gradient=NUMBERS,
    parameter=NUMBERS,
    center=NUMBERS,
    weight=st.floats(0, 30),
    rate=st.floats(0.01, 3),
    decay=st.floats(0, 1),
)
def test_a_step_ends_at_the_minimum(
    gradient: float,
    parameter: float,
    center: float,
    weight: float,
    rate: float,
    decay: float,
) -> None:
    g, p, c = (torch.tensor([value]) for value in (gradient, parameter, center))
    end = p - rate * (pulled(g, p, c, weight, rate, decay=decay) + decay * p)
    # The slope of ⟨g + d p, q⟩ + (q - p)² / (2 η) + λ/2 (q - c)² at q = end.
    slope = g + decay * p + (end - p) / rate + weight * (end - c)
    scale = abs(gradient) + (abs(parameter) + abs(center)) * (1 / rate + weight) + 1
    assert abs(float(slope)) < 1e-5 * scale


def test_no_weight_leaves_the_gradient_as_it_is() -> None:
    gradient, parameters, center = torch.randn(
        3, 50, generator=torch.Generator().manual_seed(1)
    )
    for decay in (0.0, 0.7):
        found = pulled(gradient, parameters, center, 0.0, 0.3, decay=decay)
        assert torch.equal(found, gradient)


@pytest.mark.parametrize("weight", [1e8, 1e300])
@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_an_infinite_weight_ends_at_the_center(weight: float, decay: float) -> None:
    gradient, parameters, center = torch.randn(
        3, 50, generator=torch.Generator().manual_seed(1)
    )
    step = pulled(gradient, parameters, center, weight, 0.3, decay=decay)
    end = parameters - 0.3 * (step + decay * parameters)
    torch.testing.assert_close(end, center, rtol=0, atol=1e-6)


def test_only_what_is_chosen_is_pulled() -> None:
    gradient, parameters = torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0])
    where = torch.tensor([False, True])
    found = pulled(gradient, parameters, torch.ones(2), 0.5, 2, where=where)
    assert found.tolist() == [2.0, 1.5]


def test_buffers_of_the_center_are_left_out(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    training = TrainingSettings(batch_size=3, local_epochs=4, weight_decay=0.2)
    task = normed_task(training)
    assert len(task.initial_weights) > task.model.num_parameters
    examples, start, rate = noisy(6, 0, seed=1).train, task.initial_weights, 0.1
    everything = torch.ones(len(start), dtype=torch.bool)
    hook = pull(start, 1e30, rate, 0.2, everything)
    result = local_sgd(task, start, examples, rate, RandomKey(1), gradient_hook=hook)
    kept = slice(0, task.model.num_parameters)
    torch.testing.assert_close(result.weights[kept], start[kept])
    assert not torch.equal(result.weights[kept.stop :], start[kept.stop :])


def test_a_strong_pull_does_not_diverge(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, local_epochs=30))
    examples, rate = noisy(6, 0, seed=1).train, 0.3
    center = torch.zeros_like(task.initial_weights)
    # η λ = 3: the explicit step p - η λ p multiplies p by -2 each time.
    result = local_sgd(
        task,
        task.initial_weights,
        examples,
        rate,
        RandomKey(1),
        gradient_hook=pull(center, 10.0, rate, weight_decay=0.0),
    )
    assert float(result.weights[: task.model.num_parameters].abs().max()) < 1


def test_no_weight_is_plain_sgd_in_every_bit(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    training = TrainingSettings(
        batch_size=3, local_epochs=3, momentum=0.9, weight_decay=0.1
    )
    task, examples = normed_task(training), noisy(6, 0, seed=1).train
    start, hook = task.initial_weights, pull(task.initial_weights + 1, 0.0, 0.1, 0.1)
    plain = local_sgd(task, start, examples, 0.1, RandomKey(1))
    found = local_sgd(task, start, examples, 0.1, RandomKey(1), gradient_hook=hook)
    assert torch.equal(found.weights, plain.weights)


def test_what_is_not_pulled_decays_as_ever(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task = normed_task(TrainingSettings(weight_decay=0.5))
    examples, start = noisy(6, 0, seed=1).train, task.initial_weights
    head = task.head_mask
    hook = pull(torch.zeros_like(start), 1e30, 0.1, 0.5, head)
    plain = local_sgd(task, start, examples, 0.1, RandomKey(1)).weights
    found = local_sgd(
        task, start, examples, 0.1, RandomKey(1), gradient_hook=hook
    ).weights
    assert torch.equal(found[~head], plain[~head])
    torch.testing.assert_close(found[head], torch.zeros(int(head.sum())))
