import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.strategies.core.averaging import RunningMean, average_weights
from knnper.strategies.core.records import ModelUpdate

FLOATS = st.floats(-1e6, 1e6, width=32)


def test_weights_each_client_by_its_examples() -> None:
    updates = [
        ("a", ModelUpdate(torch.tensor([4.0, 0.0]), num_examples=3, train_loss=0.0)),
        ("b", ModelUpdate(torch.tensor([0.0, 8.0]), num_examples=1, train_loss=0.0)),
    ]
    # (3·4 + 1·0) / 4 = 3 and (3·0 + 1·8) / 4 = 2.
    state = average_weights(iter(updates))
    assert torch.equal(state.weights, torch.tensor([3.0, 2.0]))


@settings(max_examples=30, deadline=None)
@given(values=st.lists(FLOATS, min_size=1), weight=st.integers(1, 10**6))
def test_mean_of_one_tensor_is_that_tensor(values: list[float], weight: int) -> None:
    tensor = torch.tensor(values)
    mean = RunningMean()
    mean.add(tensor, weight)
    assert torch.equal(mean.result(), tensor)


@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(FLOATS, st.integers(1, 1000)), min_size=1, max_size=20))
def test_mean_agrees_with_exact_sum(pairs: list[tuple[float, int]]) -> None:
    mean = RunningMean()
    for value, weight in pairs:
        mean.add(torch.tensor([value]), weight)
    total = sum(weight for _, weight in pairs)
    expected = sum(value * weight for value, weight in pairs) / total
    assert float(mean.result_float64()) == pytest.approx(expected, abs=1e-6)


def test_does_not_change_what_is_added() -> None:
    tensor = torch.tensor([1.0])
    mean = RunningMean()
    mean.add(tensor, 2)
    mean.add(tensor, 2)
    assert torch.equal(tensor, torch.tensor([1.0]))


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_refuses_a_weight_that_is_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=f"expected a positive weight, found {weight}"):
        RunningMean().add(torch.tensor([1.0]), weight)


def test_refuses_another_shape() -> None:
    mean = RunningMean()
    mean.add(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"expected shape \(3,\), found \(1,\)"):
        mean.add(torch.ones(1), 1)


def test_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="the mean of no tensors"):
        RunningMean().result()
