"""FedPAC on one feature: two rounds by hand, and how heads are mixed."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from knnper.experiment import (
    MultiStepSchedule,
    TrainingSettings,
)
from knnper.seeding import RandomKey
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.fedpac import (
    FedPAC,
    FedPACPayload,
    FedPACSettings,
    FedPACUpdate,
    combinations,
)
from tests.strategies.tiny import (
    KEY,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    text_task,
    two_weights_task,
    white,
)

HALF = TrainingSettings(learning_rate=0.5)
NORMED = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5)
CLIENTS = {"a": white([0, 0, 0]), "b": white([0, 1])}
STEP = 0.5 / (1 + math.e)  # ½ σ(-1)


def test_two_rounds_by_hand() -> None:
    method = FedPAC(two_weights_task(HALF, a=1, b=0), FedPACSettings(0.25))
    first, _ = run_rounds(method, CLIENTS, num_rounds=1)
    # FedRep's: the head of a is ½ and its body 1 + ½ σ(-1); the labels of b cancel.
    body, head = 1 + 0.6 * STEP, 0.6 * 0.5
    assert first.weights.tolist() == pytest.approx([body, head], abs=1e-6)
    # Means of the classes' embeddings, a x: of the 3 examples of a, and of one of b.
    low = (3 * (1 + STEP) + 1) / 4
    assert first.centroids.tolist() == [[pytest.approx(low)], [1.0]]
    assert first.known.tolist() == [1, 1]
    # Under a = 1: h = (1, 0) and (½, ½), V = (1 - 1) / 3 and (1 - ½) / 2. So a, without
    # variance, keeps its head; b takes of a's V_b / (V_a + V_b + |h_a - h_b|²) = ⅓.
    heads = {name: head.tolist() for name, head in first.heads.items()}
    assert heads == {"a": pytest.approx([0.5]), "b": pytest.approx([0.5 / 3])}
    second, _ = run_rounds(method, CLIENTS, num_rounds=2)

    def trained(head: float, labels: Sequence[int]) -> tuple[float, float]:
        """Step along the head's gradient, and then along the body's and the pull's."""
        signs = [1 - 2 * label for label in labels]

        def slope(b: float) -> float:
            slopes = [-2 * sign / (1 + math.exp(2 * sign * body * b)) for sign in signs]
            return sum(slopes) / len(slopes)

        head -= 0.5 * body * slope(head)
        away = [body - (low, 1.0)[label] for label in labels]
        pull = 0.25 * 2 * sum(away) / len(away)
        return body - 0.5 * (head * slope(head) + pull), head

    of_a, of_b = trained(0.5, [0, 0, 0]), trained(0.5 / 3, [0, 1])
    mean = [0.6 * a + 0.4 * b for a, b in zip(of_a, of_b, strict=True)]
    assert second.weights.tolist() == pytest.approx(mean, abs=1e-6)


def test_without_its_two_parts_its_rounds_are_fedreps() -> None:
    task = normed_task(NORMED)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    plain = FedPACSettings(0.0, mixes_heads=False, head_epochs=2)
    fedrep = of_name("fedrep", task, head_epochs=2)
    expected, memory = run_rounds(fedrep, clients, num_rounds=2)
    state, _ = run_rounds(FedPAC(task, plain), clients, num_rounds=2)
    body = ~task.head_mask
    assert torch.equal(state.weights[body], expected.weights[body])
    for name, part in memory.items():
        assert torch.equal(state.heads[name], part.personal)
    for settings in (
        replace(plain, alignment_weight=1.0),
        replace(plain, mixes_heads=True),
    ):
        other, _ = run_rounds(FedPAC(task, settings), clients, num_rounds=2)
        assert not torch.equal(other.weights[body], expected.weights[body])


def update(shares: Sequence[float], means: Sequence[float], size: int) -> FedPACUpdate:
    column = torch.tensor(means)[:, None]
    return FedPACUpdate(
        torch.zeros(2), size, 0.5, torch.tensor(shares), column, column, 0.5
    )


def test_centroids_are_means_by_example_and_stay_for_missing_classes() -> None:
    method = FedPAC(two_weights_task(HALF, a=1, b=1), FedPACSettings())
    before = method.init(("a", "b"), KEY)
    assert before.known.tolist() == [0, 0]
    update_a, update_b = (
        update([1.0, 0.0], [2.0, 0.0], 6),
        update([0.5, 0.5], [6.0, 7.0], 4),
    )
    first = method.aggregate(before, iter([("b", update_b), ("a", update_a)]))
    assert first.centroids.flatten().tolist() == [(6 * 2 + 2 * 6) / 8, 7.0]
    second = method.aggregate(first, iter([("a", update_a)]))
    assert second.centroids.flatten().tolist() == [2.0, 7.0]
    assert second.known.tolist() == [1, 1]
    assert sorted(second.heads) == ["a", "b"]
    payload = method.broadcast(second, UNSEEN_CLIENT, KEY)
    negative = replace(update_a, shares=torch.tensor([2.0, -1.0]))
    assert method.update_problem(payload, update_a) is None
    for wrong in (negative, replace(update_a, variance=math.inf)):
        assert "from 0, found" in str(method.update_problem(payload, wrong))


def test_clients_train_once_more_in_the_end() -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    training = TrainingSettings(num_rounds=3, learning_rate=0.5, schedule=schedule)
    method = FedPAC(
        two_weights_task(training, a=1, b=1),
        FedPACSettings(head_learning_rate=1.0, unseen_epochs=1),
    )
    unknown = torch.zeros(2, 1), torch.zeros(2)
    payload = FedPACPayload(torch.tensor([1.0, 2.0]), *unknown, torch.zeros(1))
    seen = one_model_of(method, payload, None, white([0]))
    # From its own b = 0, at a tenth of the rates: ∂b = -2 σ(0); ∂a = -2b σ(-2b).
    assert seen.weights.tolist() == pytest.approx(
        [1 + 0.05 * 0.2 / (1 + math.exp(0.2)), 0.1], abs=1e-6
    )
    unseen = one_model_of(method, replace(payload, head=None), None, white([0]))
    # From the mean b = 2, at the first rates, 1 and ½: ∂b = -2 σ(-4).
    head = 2 + 2 / (1 + math.exp(4))
    expected = [1 + head / (1 + math.exp(2 * head)), head]
    assert unseen.weights.tolist() == pytest.approx(expected, abs=1e-6)
    nobody = one_model_of(method, payload, None, white([]))
    assert torch.equal(nobody.weights, payload.weights)


def test_a_model_with_losses_of_its_own_is_aligned_too() -> None:
    task = text_task(learning_rate=0.1)
    method = FedPAC(task, FedPACSettings())
    images = torch.randint(
        0, 4, (6, 1, 1, 5), generator=torch.Generator().manual_seed(0)
    )
    data = white([0, 1, 2, 3, 0, 1])
    text = replace(data, train=replace(data.train, images=images.to(torch.uint8)))
    state, _ = run_rounds(method, {"a": text}, num_rounds=2)
    assert bool(torch.isfinite(state.weights).all())
    assert bool(state.known.all())


@pytest.mark.parametrize(
    ("variances", "means", "expected"),
    [
        # One mean: the inverse variances.
        ([1.0, 3.0], [[2.0], [2.0]], [[0.75, 0.25], [0.75, 0.25]]),
        # α_2 = V_1 / (V_1 + V_2 + δ²), δ² = 4, and the other way round.
        ([1.0, 3.0], [[0.0], [2.0]], [[7 / 8, 1 / 8], [3 / 8, 5 / 8]]),
        # Who has no variance mixes nothing in.
        ([0.0, 1.0], [[0.0, 1.0], [5.0, 1.0]], [[1.0, 0.0], [1 / 26, 25 / 26]]),
        ([0.0, 0.0], [[3.0], [3.0]], [[0.5, 0.5], [0.5, 0.5]]),
        ([1.0], [[3.0]], [[1.0]]),
    ],
)
def test_combinations_by_hand(
    variances: list[float], means: list[list[float]], expected: list[list[float]]
) -> None:
    shares = combinations(np.array(variances), np.array(means))
    np.testing.assert_allclose(shares, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_combinations_are_the_minima(seed: int) -> None:
    generator = RandomKey(seed).numpy()
    variances, means = generator.gamma(0.3, size=9), generator.normal(size=(9, 4)) + 50
    combined = combinations(variances, means)
    assert len(combined) == 9
    for i, shares in enumerate(combined):
        away = means - means[i]
        slopes = (np.diag(variances) + away @ away.T) @ shares
        assert shares.min() >= 0
        assert shares.sum() == pytest.approx(1)
        # Karush, Kuhn and Tucker: none is lower than of those that take part.
        np.testing.assert_allclose(slopes[shares > 1e-6], slopes @ shares, atol=1e-6)
        assert (slopes > slopes @ shares - 1e-6).all()


@pytest.mark.parametrize("huge", [1e9, 1e300])
def test_huge_variance_does_not_change_mixtures_of_others(huge: float) -> None:
    generator = RandomKey(0).numpy()
    variances, means = generator.gamma(2, size=5), generator.normal(size=(5, 4))
    expected = combinations(variances[1:], means[1:])
    shares = combinations(np.array([huge, *variances[1:]]), means)
    np.testing.assert_allclose(shares[1:, 0], 0, atol=1e-4)
    np.testing.assert_allclose(shares[1:, 1:], expected, atol=1e-3)
