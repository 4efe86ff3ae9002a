"""The choice of λ, k and σ: by hand, against separate evaluations, and at its ends."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.prediction import interpolate, neighbor_vote, paper_kernel
from knnper.datastore.tuning import (
    CRITERIA,
    Candidates,
    Choice,
    Criterion,
    CriterionName,
    Evidence,
    Prior,
    Queries,
    candidates,
    choose,
    log_likelihood,
    no_evidence,
    num_correct,
    score,
)
from knnper.seeding import RandomKey

GRID = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
NUM_CLASSES = 3
# Row 0 turns to class 0 above λ = 1/6, row 1 above 3/8, row 2 never.
NEIGHBOR_LABELS = [[0], [0], [1]]
GLOBAL = torch.tensor([[0.4, 0.6], [0.2, 0.8], [0.45, 0.55]])


def one_neighbour(labels: list[int]) -> Evidence:
    """Return three queries whose only neighbours vote 0, 0 and 1."""
    queries = Queries(torch.zeros((3, 2)), GLOBAL, torch.tensor(labels))
    distances = torch.ones((3, 1), dtype=torch.float64)
    return Evidence(queries, distances, torch.tensor(NEIGHBOR_LABELS))


def chosen_weight(
    evidence: Evidence,
    weights: tuple[float, ...] = GRID,
    criterion: Criterion = num_correct,
    prior: Prior | None = None,
) -> float:
    grid = candidates(weights, [1], [1.0])
    given_prior = prior or Prior(0.0, 0.0)
    return choose(evidence, grid, paper_kernel, criterion, given_prior).knn_weight


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([1, 1, 1], 0.0), ([0, 1, 1], 0.3), ([0, 0, 1], 0.5), ([0, 0, 0], 0.5)],
)
def test_the_smallest_of_the_best_weights_is_chosen(
    labels: list[int], expected: float
) -> None:
    assert chosen_weight(one_neighbour(labels)) == expected


def test_the_weights_may_come_in_any_order_and_twice() -> None:
    weights = (1.0, 0.9, 0.5, 0.9, 0.7, 0.0)
    assert chosen_weight(one_neighbour([0, 0, 1]), weights) == 0.5


def test_the_log_loss_prefers_what_is_likely() -> None:
    # At λ: (0.4 + 0.6 λ)(0.2 + 0.8 λ)(0.45 - 0.45 λ); by hand 0.0360 at 0, 0.0562 at
    # 0.1, 0.0804 at 0.3, 0.0945 at 0.5, 0.0842 at 0.7, 0.0389 at 0.9, 0 at 1. By
    # accuracy 0.5 to 1 tie, so that the smaller would win, and 0.7 would beat 0.3.
    evidence = one_neighbour([0, 0, 0])
    weights = (0.3, 0.7, 1.0)

    assert chosen_weight(evidence, weights, log_likelihood) == 0.7
    assert chosen_weight(evidence, GRID, log_likelihood) == 0.5


def test_an_impossible_label_costs_a_finite_loss() -> None:
    one = torch.tensor([[1.0, 0.0]])
    labels, weights = torch.tensor([1]), torch.tensor([0.0, 0.5], dtype=torch.float64)
    expected = torch.full((2,), 1e-12, dtype=torch.float64).log()
    torch.testing.assert_close(log_likelihood(one, one, labels, weights), expected)


@pytest.mark.parametrize("criterion", CRITERIA.values())
def test_the_global_model_is_a_candidate_wherever_there_is_a_choice(
    criterion: Criterion,
) -> None:
    always_wrong_neighbours = one_neighbour([1, 1, 0])
    assert chosen_weight(always_wrong_neighbours, (0.9, 1.0), criterion) == 0.0


def test_a_single_weight_is_fixed() -> None:
    assert candidates([1.0, 1.0], [1], [1.0]) == Candidates((1.0,), (1,), (1.0,))
    assert candidates([1.0], [1], [1.0]).is_fixed
    assert chosen_weight(one_neighbour([1, 1, 0]), (1.0,)) == 1.0


@pytest.mark.parametrize(
    "values", [([], [1], [1.0]), ([0.0], [], [1.0]), ([0.0], [1], [])]
)
def test_an_empty_grid_is_refused(
    values: tuple[list[float], list[int], list[float]],
) -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        candidates(*values)


def test_of_equally_good_ones_few_neighbours_and_a_large_scale_are_chosen() -> None:
    # Both neighbours of the only query say the same, whatever k and σ are.
    queries = Queries(
        torch.zeros((1, 2)), torch.tensor([[0.4, 0.6]]), torch.tensor([0])
    )
    distances = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    evidence = Evidence(queries, distances, torch.tensor([[0, 0]]))
    grid = candidates(GRID, [2, 1], [0.5, 4.0, 1.0])

    chosen = choose(evidence, grid, paper_kernel, num_correct)
    assert chosen == Choice(0.3, 1, 4.0)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    num_queries, num_found = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    generator = RandomKey(draw(st.integers(0, 10_000))).numpy()

    def labels(*shape: int) -> Tensor:
        return torch.from_numpy(generator.integers(0, NUM_CLASSES, shape))

    logits = 3 * torch.from_numpy(generator.normal(size=(num_queries, NUM_CLASSES)))
    queries = Queries(
        torch.zeros((num_queries, 4)),
        logits.float().softmax(dim=1),
        labels(num_queries),
    )
    shape = (num_queries, num_found)
    distances = torch.from_numpy(generator.random(shape)).sort(dim=1).values
    return Evidence(queries, distances, labels(*shape))


def separate_score(
    evidence: Evidence, choice: Choice, criterion: CriterionName
) -> float:
    """Score one combination as the predictor would mix, one query at a time."""
    total = 0.0
    queries = evidence.queries
    for row, label in enumerate(queries.labels.tolist()):
        nearest = slice(0, choice.num_neighbors)
        log_weights = paper_kernel(
            evidence.squared_distances[row : row + 1, nearest], choice.kernel_scale, 4
        )
        neighbor_labels = evidence.neighbor_labels[row : row + 1, nearest]
        alone = queries.probabilities[row : row + 1]
        votes = neighbor_vote(log_weights, neighbor_labels, alone.shape[1])
        mixed = interpolate(votes, alone, choice.knn_weight)[0]
        if criterion == "accuracy":
            total += int(mixed.argmax()) == label
        else:
            total += float(mixed[label].double().clamp_min(1e-12).log())
    return total


@pytest.mark.parametrize("criterion", ["accuracy", "log_loss"])
@settings(max_examples=25, deadline=None)
@given(evidence=evidences())
def test_the_joint_choice_equals_separate_evaluations(
    criterion: CriterionName, evidence: Evidence
) -> None:
    counts, scales = (1, 2, 5), (2.0, 0.3)
    combinations = [Choice(*one) for one in itertools.product(GRID, counts, scales)]
    scores = [separate_score(evidence, one, criterion) for one in combinations]
    rule = CRITERIA[criterion]
    grid = candidates(GRID, counts, scales)

    chosen = choose(evidence, grid, paper_kernel, rule)
    # max returns the first of several largest, as the ties are meant to go.
    if criterion == "accuracy":
        best = max(range(len(scores)), key=scores.__getitem__)
        assert chosen == combinations[best]
    assert scores[combinations.index(chosen)] == pytest.approx(max(scores), abs=1e-5)


@pytest.mark.parametrize("criterion", ["accuracy", "log_loss"])
@settings(max_examples=25, deadline=None)
@given(
    evidence=evidences(),
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4, unique=True),
)
def test_the_choice_is_never_worse_than_the_global_model(
    criterion: CriterionName, evidence: Evidence, weights: list[float]
) -> None:
    rule = CRITERIA[criterion]
    grid = candidates(weights, (1, 3), (1.0, 0.1))

    chosen = choose(evidence, grid, paper_kernel, rule)
    alone = separate_score(evidence, Choice(0.0, 1, 1.0), criterion)
    assert separate_score(evidence, chosen, criterion) >= alone - 1e-5


@settings(max_examples=25, deadline=None)
@given(evidence=evidences(), expected=st.floats(0, 1))
def test_a_prior_without_strength_changes_nothing(
    evidence: Evidence, expected: float
) -> None:
    grid = candidates(GRID, (1, 3), (1.0, 0.1))
    with_prior = choose(
        evidence, grid, paper_kernel, log_likelihood, Prior(expected, 0.0)
    )
    assert with_prior == choose(evidence, grid, paper_kernel, log_likelihood)


@pytest.mark.parametrize("criterion", ["accuracy", "log_loss"])
@settings(max_examples=25, deadline=None)
@given(evidence=evidences(), expected=st.floats(0, 1))
def test_a_strong_prior_decides(
    criterion: CriterionName, evidence: Evidence, expected: float
) -> None:
    chosen = chosen_weight(evidence, GRID, CRITERIA[criterion], Prior(expected, 1e9))
    scores = [
        separate_score(evidence, Choice(weight, 1, 1.0), criterion) for weight in GRID
    ]
    allowed = [
        weight
        for weight, one in zip(GRID, scores, strict=True)
        if one >= scores[0] - 1e-9
    ]
    distance = min(abs(weight - expected) for weight in allowed)
    assert abs(chosen - expected) == pytest.approx(distance, abs=1e-6)


def test_a_prior_counts_as_so_many_examples() -> None:
    # Two of three are right from 0.5 on, one below 0.3, so that one example decides
    # between 0.1 and 0.5; 1 - (0.5 - 0.1)^2 s = 0 at s = 6.25. At 0.3 two are right.
    evidence = one_neighbour([0, 0, 0])
    weights = (0.0, 0.1, 0.3, 0.5)
    assert num_right_at(evidence, weights) == [0, 0, 1, 2]

    chosen = [
        chosen_weight(evidence, weights, num_correct, Prior(0.1, strength))
        for strength in (7.0, 9.0, 24.0, 26.0)
    ]
    # 2 - 0.16 s against 1 - 0.04 s: equal at s = 8.33. Against 0: 0.04 s = 1 at 25.
    assert chosen == [0.5, 0.3, 0.3, 0.1]


def num_right_at(evidence: Evidence, weights: tuple[float, ...]) -> list[float]:
    return [
        separate_score(evidence, Choice(weight, 1, 1.0), "accuracy")
        for weight in weights
    ]


@pytest.mark.parametrize(
    ("prior", "expected"),
    [(Prior(0.0, 0.0), 0.0), (Prior(0.56, 1.0), 0.5), (Prior(0.61, 1.0), 0.7)],
)
def test_without_evidence_the_prior_decides_or_the_global_model_stays(
    prior: Prior, expected: float
) -> None:
    assert chosen_weight(no_evidence(2), (0.3, 0.5, 0.7), prior=prior) == expected
    assert chosen_weight(no_evidence(2), (0.3,), prior=prior) == 0.3


def test_large_evidence_is_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = one_neighbour([0, 1, 1])
    grid = candidates(GRID, [1], [1.0, 2.0])
    whole = score(evidence, grid, paper_kernel, num_correct)
    monkeypatch.setattr("knnper.datastore.tuning.NUMBERS_AT_ONCE", 1)
    assert torch.equal(score(evidence, grid, paper_kernel, num_correct), whole)
