"""Aggregation that few bad clients cannot lead: by hand and by definition."""

from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import RunError
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelState
from knnper.strategies.core.task import Task
from knnper.strategies.fedtrimmedavg import trimmed_at_each_end
from knnper.strategies.krum import iterated_krum
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    on_a_line,
    random_updates,
    run_rounds,
    updates,
)

BEFORE = ModelState(torch.zeros(2))


def multikrum(task: Task, num_malicious: int, num_selected: int | None) -> Method:
    given = {"num_malicious": num_malicious, "num_selected": num_selected}
    return of_name("multikrum", task, **given)


SEVEN = (0, 1, 2, 3, 10, 10.1, 10.3)
# Steps of the smallest size that float32 has at 10,000, where the squares of the
# norms (10^8) would have lost them.
STEPS = tuple(10_000 + step * 2**-10 for step in (0, 1, 3, 10, 100))


@pytest.mark.parametrize(
    ("num_malicious", "line", "chosen"),
    [
        # To the 5 - 1 - 2 = 2 closest: 0: 1 + 9 = 10; 1: 1 + 4 = 5; 3: 4 + 9 = 13;
        # 10: 49 + 81; 100: 8100 + 9409.
        (1, (0, 1, 3, 10, 100), 1),
        # 5 neighbours; the middle of all, 3, has 0: 9 + 1 + 4 ... the least.
        (0, SEVEN, 3),
        # 3 neighbours, of which 10.1 has two at less than 0.21 and one at 7.1: 50.4;
        # 1 has 1 + 1 + 4, as 2 has, and is the first.
        (2, SEVEN, 1),
        (0, (-99, 101, 0, 2), 0),  # 0: 4 + 99²; 2: 4 + 99²
        (0, (-99, 101, 2, 0), 2),
        (0, range(40), 19),  # the two in the middle, to all but the farthest
        (0, range(39, -1, -1), 20),
        (1, STEPS, STEPS[1]),
    ],
)
def test_krum_by_hand(num_malicious: int, line: Sequence[float], chosen: float) -> None:
    method = of_name("krum", linear_task(), num_malicious=num_malicious)
    after = method.aggregate(BEFORE, iter(on_a_line(*line)))
    assert after.weights.tolist() == [chosen, 0]


def test_one_attacker_is_not_followed() -> None:
    method = of_name("krum", linear_task(), num_malicious=1)
    honest = [[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [1.1, 1.1]]
    attacked = updates(*honest, [-1e6, 1e6], examples=[1, 1, 1, 1, 10**6])
    after = method.aggregate(BEFORE, iter(attacked)).weights
    assert any(torch.equal(after, torch.tensor(weights)) for weights in honest)


@pytest.mark.parametrize(
    ("name", "settings", "least", "message"),
    [
        ("krum", {"num_malicious": 2}, 7, r"\(2 f \+ 3 with f = 2\), found 6; raise"),
        ("multikrum", {"num_malicious": 1}, 5, "at least 5 .* found 4"),
        (
            "multikrum",
            {"num_malicious": 1, "num_selected": 6},
            6,
            r"at least 6 .* \(method\.num_selected is 6\), found 5",
        ),
        ("bulyan", {"num_malicious": 2}, 11, r"\(4 f \+ 3 with f = 2\), found 10"),
    ],
)
def test_too_few_clients_are_refused(
    name: str, settings: dict[str, int], least: int, message: str
) -> None:
    method = of_name(name, linear_task(), **settings)
    with pytest.raises(RunError, match=message):
        method.aggregate(BEFORE, iter(on_a_line(*range(least - 1))))
    with pytest.raises(RunError, match=message):
        method.init([str(i) for i in range(least - 1)], KEY)
    method.init([str(i) for i in range(least)], KEY)
    method.aggregate(BEFORE, iter(on_a_line(*range(least))))


def test_the_mean_of_the_best_by_hand() -> None:
    task = linear_task()
    line = ([0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [10.0, 0.0], [100.0, 0.0])
    held = updates(*line, examples=[1, 3, 4, 2, 9])
    # The scores are 10, 5, 13, 130, 17509 (above): of two, the models 1 and 0,
    # weighted by examples: 3 · 1 / 4.
    two = multikrum(task, 1, 2).aggregate(BEFORE, iter(held))
    assert two.weights.tolist() == [0.75, 0]
    # Without a number n - f = 4: (0 + 3 + 12 + 20) / 10.
    four = of_name("multikrum", task, num_malicious=1).aggregate(BEFORE, iter(held))
    assert four.weights.tolist() == [3.5, 0]


def test_all_selected_is_fedavg() -> None:
    task = normed_task(batch_size=3, learning_rate=0.1)
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abcd")}
    plain, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=1)
    for chosen in (None, 4):
        state, _ = run_rounds(multikrum(task, 0, chosen), clients, num_rounds=1)
        torch.testing.assert_close(state.weights, plain.weights, rtol=1e-6, atol=1e-7)


def test_of_equal_scores_the_first_clients_is_averaged() -> None:
    task = linear_task()
    # 0 and 2 have the least score, and -99 and 101 the next: the third is -99.
    held = on_a_line(-99, 101, 0, 2)
    after = multikrum(task, 0, 3).aggregate(BEFORE, iter(held))
    assert after.weights.tolist() == [pytest.approx(-97 / 3), 0]
    single = multikrum(task, 0, 1).aggregate(BEFORE, iter(held))
    assert single.weights.tolist() == [0, 0]


def test_both_phases_by_hand() -> None:
    method = of_name("bulyan", linear_task(), num_malicious=1)
    # θ = 7 - 2 = 5 times Krum's choice, of what is left:
    # 0 1 2 3 5 7 8, 4 neighbours: scores 39 22 15 18 26 46 71, so 2;
    # 0 1 3 5 7 8, 3 neighbours: 35 21 17 17 .. .., so 3;
    # 0 1 5 7 8, 2 neighbours: 26 17 13 5 10, so 7;
    # 0 1 5 8, 1 neighbour: 1 1 9 9, so 0;  1 5 8, 1 neighbour: 16 9 9, so 5.
    # The β = 3 of {0, 2, 3, 5, 7} closest to their median 3 are 2, 3, 5. One run of
    # Krum would have selected {0, 1, 2, 3, 5}, and ended with 2.
    after = method.aggregate(BEFORE, iter(on_a_line(0, 1, 2, 3, 5, 7, 8)))
    assert after.weights.tolist() == [pytest.approx(10 / 3), 0]


@pytest.mark.parametrize(("num_clients", "num_malicious"), [(7, 1), (12, 2), (15, 3)])
def test_the_second_phase_against_its_definition(
    num_clients: int, num_malicious: int
) -> None:
    task = normed_task()
    held = random_updates(num_clients, task.model.num_weights, seed=num_clients)
    models = np.stack([update.weights.double().numpy() for _, update in held])
    distances = ((models[:, None] - models) ** 2).sum(axis=2)
    selected = models[iterated_krum(distances, num_malicious)]
    num_closest = num_clients - 4 * num_malicious
    expected = []
    for values in selected.T.tolist():
        middle = median(values)
        closest = sorted(values, key=lambda value: abs(value - middle))
        expected.append(fmean(closest[:num_closest]))
    method = of_name("bulyan", task, num_malicious=num_malicious)
    after = method.aggregate(ModelState(task.initial_weights), iter(held[::-1]))
    torch.testing.assert_close(after.weights, torch.tensor(expected))


def test_one_bad_weight_is_not_followed() -> None:
    method = of_name("bulyan", linear_task(), num_malicious=1)
    honest = [[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [1.1, 1.1], [1.2, 1.0], [1.1, 1.2]]
    attacked = updates(*honest, [1.1, 1.6], examples=[1, 1, 1, 1, 1, 1, 10**6])
    after = method.aggregate(BEFORE, iter(attacked)).weights
    assert 1.0 <= float(after[0]) <= 1.2
    assert 1.0 <= float(after[1]) <= 1.2


@pytest.mark.parametrize(
    ("name", "setting"),
    # ⌊0.1 · 6⌋ = 0 too.
    [
        ("bulyan", {"num_malicious": 0}),
        ("fedtrimmedavg", {"trimmed_fraction": 0.0}),
        ("fedtrimmedavg", {"trimmed_fraction": 0.1}),
    ],
)
def test_without_bad_clients_it_is_the_plain_mean(
    name: str, setting: dict[str, float]
) -> None:
    task = normed_task()
    held = random_updates(6, task.model.num_weights, seed=2)
    method = of_name(name, task, **setting)
    after = method.aggregate(ModelState(task.initial_weights), iter(held))
    mean = (
        torch.stack([update.weights for _, update in held]).double().mean(dim=0).float()
    )
    torch.testing.assert_close(after.weights, mean, rtol=1e-6, atol=1e-7)


def test_the_median_of_each_weight_whatever_the_sizes() -> None:
    method = of_name("fedmedian", linear_task())
    odd = updates([1.0, 9.0], [5.0, 2.0], [1000.0, 4.0], examples=[1, 1, 50])
    assert method.aggregate(BEFORE, iter(odd)).weights.tolist() == [5, 4]
    # Of an even number, the mean of the two in the middle.
    even = updates([1.0, 9.0], [5.0, 2.0], [1000.0, 4.0], [2.0, 5.0])
    assert method.aggregate(BEFORE, iter(even)).weights.tolist() == [3.5, 4.5]


FIVE = updates(
    [1.0, 9.0],
    [2.0, 8.0],
    [3.0, -99.0],
    [6.0, 1.0],
    [99.0, 0.0],
    examples=[9, 1, 1, 1, 1],
)


def test_the_extremes_of_each_weight_are_left_out() -> None:
    task = linear_task()
    # ⌊0.2 · 5⌋ = 1 at each end: (2 + 3 + 6) / 3 and (0 + 1 + 8) / 3.
    method = of_name("fedtrimmedavg", task, trimmed_fraction=0.2)
    assert method.aggregate(BEFORE, iter(FIVE)).weights.tolist() == pytest.approx(
        [11 / 3, 3]
    )
    # ⌊0.4 · 5⌋ = 2: the medians.
    two = of_name("fedtrimmedavg", task, trimmed_fraction=0.4)
    assert two.aggregate(BEFORE, iter(FIVE)).weights.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("fraction", "num_values", "expected"),
    # As floats 0.29 · 100 is 28.999... and 0.28 · 25 is 7.000...1.
    [(0.29, 100, 29), (0.28, 25, 7), (0.2, 4, 0), (0.25, 4, 1), (0.4999999999, 2, 0)],
)
def test_how_many_are_trimmed(fraction: float, num_values: int, expected: int) -> None:
    assert trimmed_at_each_end(fraction, num_values) == expected


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 0.4999999), st.integers(1, 60))
def test_something_is_always_left(fraction: float, num_values: int) -> None:
    num_trimmed = trimmed_at_each_end(fraction, num_values)
    assert 0 <= 2 * num_trimmed < num_values
    # What Flower makes of the fraction that it is given.
    assert int((num_trimmed + 0.25) / num_values * num_values) == num_trimmed
    assert (num_trimmed + 0.25) / num_values < 0.5
