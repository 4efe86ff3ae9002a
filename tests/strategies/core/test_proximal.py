from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData
from strategies.core.local_sgd import local_sgd
from strategies.core.proximal import pull
from strategies.core.task import Task

NUMBERS = st.floats(-5, 5, width=32)
MakeTask = Callable[[TrainingSettings], Task]
MakeClient = Callable[..., ClientData]


def pulled(
    gradient: Tensor,
    parameters: Tensor,
    center: Tensor,
    weight: float,
    rate: float,
    where: Tensor | None = None,
) -> Tensor:
    changed = gradient.clone()
    pull(center, weight, rate, where)(changed, parameters)
    return changed


def test_a_step_by_hand() -> None:
    # (g + λ (p - c)) / (1 + η λ) = (2 + ½ · (3 - 1)) / (1 + 2 · ½) = 1.5, and the step
    # ends at 3 - 2 · 1.5 = 0 = (p - η g + η λ c) / (1 + η λ) = (3 - 4 + 1) / 2.
    found = pulled(
        torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([1.0]), 0.5, 2
    )
    assert found.tolist() == [1.5]


@settings(max_examples=30, deadline=None)
@given(
    gradient=NUMBERS,
    parameter=NUMBERS,
    center=NUMBERS,
    weight=st.floats(0, 30),
    rate=st.floats(0.01, 3),
)
def test_a_step_ends_at_the_minimum(
    gradient: float, parameter: float, center: float, weight: float, rate: float
) -> None:
    g, p, c = (torch.tensor([value]) for value in (gradient, parameter, center))
    end = p - rate * pulled(g, p, c, weight, rate)
    # The slope of ⟨g, q⟩ + (q - p)² / (2 η) + λ/2 (q - c)² at q = end.
    slope = g + (end - p) / rate + weight * (end - c)
    scale = abs(gradient) + (abs(parameter) + abs(center)) * (1 / rate + weight) + 1
    assert abs(float(slope)) < 1e-5 * scale


def test_no_weight_leaves_the_gradient_as_it_is() -> None:
    gradient, parameters, center = torch.randn(
        3, 50, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(pulled(gradient, parameters, center, 0.0, 0.3), gradient)


@pytest.mark.parametrize("weight", [1e8, 1e300])
def test_an_infinite_weight_ends_at_the_center(weight: float) -> None:
    gradient, parameters, center = torch.randn(
        3, 50, generator=torch.Generator().manual_seed(1)
    )
    end = parameters - 0.3 * pulled(gradient, parameters, center, weight, 0.3)
    torch.testing.assert_close(end, center, rtol=0, atol=1e-6)


def test_only_what_is_chosen_is_pulled() -> None:
    gradient, parameters = torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0])
    where = torch.tensor([False, True])
    found = pulled(gradient, parameters, torch.ones(2), 0.5, 2, where)
    assert found.tolist() == [2.0, 1.5]


def test_buffers_of_the_center_are_left_out(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, local_epochs=4))
    assert len(task.initial_weights) > task.model.num_parameters
    examples, start, rate = noisy(6, 0, seed=1).train, task.initial_weights, 0.1
    everything = torch.ones(len(start), dtype=torch.bool)
    hook = pull(start, 1e30, rate, everything)
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
        gradient_hook=pull(center, 10.0, rate),
    )
    assert float(result.weights[: task.model.num_parameters].abs().max()) < 1
