from collections.abc import Sequence

import numpy as np
import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.records import ModelState
from knnper.strategies.krum import Krum, KrumSettings, lowest
from tests.strategies.small_updates import on_a_line, updates
from tests.strategies.trained_methods import MakeTask

BEFORE = ModelState(torch.zeros(2))


def test_the_closest_to_its_neighbours_by_hand(linear_task: MakeTask) -> None:
    method = Krum(linear_task(TrainingSettings()), KrumSettings(1))
    # To the 5 - 1 - 2 = 2 closest: 0: 1 + 9 = 10; 1: 1 + 4 = 5; 3: 4 + 9 = 13;
    # 10: 49 + 81; 100: 8100 + 9409.
    after = method.aggregate(BEFORE, iter(on_a_line(0, 1, 3, 10, 100)))
    assert after.weights.tolist() == [1, 0]


def test_fewer_neighbours_count_where_more_are_bad(linear_task: MakeTask) -> None:
    held = on_a_line(0, 1, 2, 3, 10, 10.1, 10.3)
    # f = 0: 5 neighbours; the middle of all, 3, has 0: 9 + 1 + 4 ... the least.
    task = linear_task(TrainingSettings())
    alone = Krum(task, KrumSettings(0)).aggregate(BEFORE, iter(held))
    assert alone.weights.tolist() == [3, 0]
    # f = 2: 3 neighbours, of which 10.1 has two at less than 0.21 and one at 7.1:
    # 50.4; 1 has 1 + 1 + 4, as 2 has, and is the first.
    expecting_two = Krum(task, KrumSettings(2)).aggregate(BEFORE, iter(held))
    assert expecting_two.weights.tolist() == [1, 0]


def test_one_attacker_is_not_followed(linear_task: MakeTask) -> None:
    method = Krum(linear_task(TrainingSettings()), KrumSettings(1))
    honest = [[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [1.1, 1.1]]
    attacked = updates(*honest, [-1e6, 1e6], examples=[1, 1, 1, 1, 10**6])
    after = method.aggregate(BEFORE, iter(attacked)).weights
    assert any(torch.equal(after, torch.tensor(one)) for one in honest)


def test_of_equal_scores_the_first_clients_wins(linear_task: MakeTask) -> None:
    method = Krum(linear_task(TrainingSettings()), KrumSettings(0))
    # One neighbour: the first two are as close to each other.
    held = on_a_line(7, 8, 100)
    for order in (held, held[::-1]):
        assert method.aggregate(BEFORE, iter(order)).weights.tolist() == [7, 0]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ((-99, 101, 0, 2), 0),  # 0: 4 + 99²; 2: 4 + 99²
        ((-99, 101, 2, 0), 2),
        (range(40), 19),  # the two in the middle, to all but the farthest
        (range(39, -1, -1), 20),
    ],
)
def test_no_order_of_sorting_makes_a_later_client_win(
    linear_task: MakeTask, line: Sequence[float], first: float
) -> None:
    method = Krum(linear_task(TrainingSettings()), KrumSettings(0))
    after = method.aggregate(BEFORE, iter(on_a_line(*line)))
    assert after.weights.tolist() == [first, 0]


def test_equal_scores_are_in_the_order_of_the_clients() -> None:
    line = np.arange(40.0)
    order = lowest((line[:, None] - line) ** 2, 0)
    assert order[:6] == [19, 20, 18, 21, 17, 22]
    everybody = lowest(np.zeros((40, 40)), 0)
    assert everybody == list(range(40))


def test_small_differences_of_large_weights_are_seen(linear_task: MakeTask) -> None:
    # Steps of the smallest size that float32 has at 10,000, where the squares of the
    # norms (10^8) would have lost them.
    steps = [10_000 + step * 2**-10 for step in (0, 1, 3, 10, 100)]
    method = Krum(linear_task(TrainingSettings()), KrumSettings(1))
    after = method.aggregate(BEFORE, iter(on_a_line(*steps)))
    assert after.weights.tolist() == [steps[1], 0]


def test_too_few_clients_are_refused(linear_task: MakeTask, key: RandomKey) -> None:
    method = Krum(linear_task(TrainingSettings()), KrumSettings(2))
    message = (
        r"expected at least 7 clients in a round \(2 f \+ 3 with f = 2\), found 6; "
        r"raise training\.participation .* lower method\.num_malicious"
    )
    with pytest.raises(RunError, match=message):
        method.aggregate(BEFORE, iter(on_a_line(*range(6))))
    with pytest.raises(RunError, match=message):
        method.init([str(i) for i in range(6)], key)
    method.init([str(i) for i in range(7)], key)
    method.aggregate(BEFORE, iter(on_a_line(*range(7))))
