from statistics import fmean, median

import numpy as np
import pytest
import torch

from knnper.errors import RunError
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.bulyan import Bulyan, BulyanSettings, iterated_krum
from knnper.strategies.core.records import ModelState
from tests.strategies.small_updates import (
    on_a_line,
    random_updates,
    updates,
)
from tests.strategies.trained_methods import MakeTask

BEFORE = ModelState(torch.zeros(2))


def test_both_phases_by_hand(linear_task: MakeTask) -> None:
    method = Bulyan(linear_task(TrainingSettings()), BulyanSettings(1))
    # θ = 7 - 2 = 5 times Krum's choice, of what is left:
    # 0 1 2 3 5 7 8, 4 neighbours: scores 39 22 15 18 26 46 71, so 2;
    # 0 1 3 5 7 8, 3 neighbours: 35 21 17 17 .. .., so 3;
    # 0 1 5 7 8, 2 neighbours: 26 17 13 5 10, so 7;
    # 0 1 5 8, 1 neighbour: 1 1 9 9, so 0;  1 5 8, 1 neighbour: 16 9 9, so 5.
    # The β = 3 of {0, 2, 3, 5, 7} closest to their median 3 are 2, 3, 5. One run of
    # Krum would have selected {0, 1, 2, 3, 5}, and ended with 2.
    after = method.aggregate(BEFORE, iter(on_a_line(0, 1, 2, 3, 5, 7, 8)))
    assert after.weights.tolist() == [pytest.approx(10 / 3), 0]


def test_krum_chooses_one_after_the_other() -> None:
    line = np.array([0.0, 1, 2, 3, 5, 7, 8])
    distances = (line[:, None] - line) ** 2
    assert iterated_krum(distances, 1) == [2, 3, 5, 0, 4]
    # Nobody is bad: everybody is chosen.
    assert sorted(iterated_krum(distances, 0)) == list(range(7))


@pytest.mark.parametrize(("num_clients", "num_malicious"), [(7, 1), (12, 2), (15, 3)])
def test_the_second_phase_against_its_definition(
    normed_task: MakeTask, num_clients: int, num_malicious: int
) -> None:
    task = normed_task(TrainingSettings())
    held = random_updates(num_clients, task.model.num_weights, seed=num_clients)
    models = np.stack([one.weights.double().numpy() for _, one in held])
    distances = ((models[:, None] - models) ** 2).sum(axis=2)
    selected = models[iterated_krum(distances, num_malicious)]
    num_closest = num_clients - 4 * num_malicious
    expected = []
    for values in selected.T.tolist():
        middle = median(values)
        closest = sorted(values, key=lambda value: abs(value - middle))
        expected.append(fmean(closest[:num_closest]))
    method = Bulyan(task, BulyanSettings(num_malicious))
    after = method.aggregate(ModelState(task.initial_weights), iter(held[::-1]))
    torch.testing.assert_close(after.weights, torch.tensor(expected))


def test_one_bad_weight_is_not_followed(linear_task: MakeTask) -> None:
    method = Bulyan(linear_task(TrainingSettings()), BulyanSettings(1))
    honest = [[1.0, 1.0], [1.1, 1.0], [1.0, 1.2], [1.1, 1.1], [1.2, 1.0], [1.1, 1.2]]
    attacked = updates(*honest, [1.1, 1.6], examples=[1, 1, 1, 1, 1, 1, 10**6])
    after = method.aggregate(BEFORE, iter(attacked)).weights
    assert 1.0 <= float(after[0]) <= 1.2
    assert 1.0 <= float(after[1]) <= 1.2


def test_without_bad_clients_it_is_the_plain_mean(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    held = random_updates(5, task.model.num_weights, seed=4)
    method = Bulyan(task, BulyanSettings(0))
    after = method.aggregate(ModelState(task.initial_weights), iter(held))
    mean = torch.stack([one.weights for _, one in held]).double().mean(dim=0).float()
    torch.testing.assert_close(after.weights, mean, rtol=1e-6, atol=1e-7)


def test_too_few_clients_are_refused(linear_task: MakeTask, key: RandomKey) -> None:
    method = Bulyan(linear_task(TrainingSettings()), BulyanSettings(2))
    message = (
        r"expected at least 11 clients in a round \(4 f \+ 3 with f = 2\), found 9"
    )
    with pytest.raises(RunError, match=message):
        method.aggregate(BEFORE, iter(on_a_line(*range(9))))
    with pytest.raises(RunError, match=message):
        method.init([str(i) for i in range(9)], key)
    method.init([str(i) for i in range(11)], key)
