import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.memory import CriterionName, PriorPoint
from knnper.datastore.prediction import (
    KnnParameters,
    interpolate,
    neighbor_vote,
    paper_kernel,
)
from knnper.datastore.store import memory_store
from knnper.datastore.tuning import (
    CRITERIA,
    NO_PRIOR,
    Criterion,
    Evidence,
    ParameterGrid,
    Prior,
    Queries,
    best_parameters,
    held_out,
    left_one_out,
    log_likelihood,
    no_evidence,
    num_correct,
    prior_of_size,
    score,
    weights_by_size,
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
    prior: Prior = NO_PRIOR,
) -> float:
    grid = ParameterGrid.of(weights, [1], [1.0])
    return best_parameters(evidence, grid, paper_kernel, criterion, prior).knn_weight


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([1, 1, 1], 0.0), ([0, 1, 1], 0.3), ([0, 0, 1], 0.5), ([0, 0, 0], 0.5)],
)
def test_the_smallest_of_the_best_weights_is_chosen(
    labels: list[int], expected: float
) -> None:
    assert chosen_weight(one_neighbour(labels)) == expected
    # In any order, and twice.
    assert chosen_weight(one_neighbour(labels), (*GRID[::-1], 0.9)) == expected


def test_no_symbolic_algebra_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    assert chosen_weight(one_neighbour([0, 0, 1])) == 0.5


def test_the_log_loss_prefers_what_is_likely() -> None:
    # At λ: (0.4 + 0.6 λ)(0.2 + 0.8 λ)(0.45 - 0.45 λ); by hand 0.0360 at 0, 0.0562 at
    # 0.1, 0.0804 at 0.3, 0.0945 at 0.5, 0.0842 at 0.7, 0.0389 at 0.9, 0 at 1. By
    # accuracy 0.5 to 1 tie, so that the smaller would win, and 0.7 would beat 0.3.
    evidence = one_neighbour([0, 0, 0])
    weights = (0.3, 0.7, 1.0)
    assert chosen_weight(evidence, weights, log_likelihood) == 0.7
    assert chosen_weight(evidence, GRID, log_likelihood) == 0.5


def test_an_impossible_label_costs_a_finite_loss() -> None:
    probabilities = torch.tensor([[1.0, 0.0]])
    labels, weights = torch.tensor([1]), torch.tensor([0.0, 0.5], dtype=torch.float64)
    expected = torch.full((2,), 1e-12, dtype=torch.float64).log()
    torch.testing.assert_close(
        log_likelihood(probabilities, probabilities, labels, weights), expected
    )


@pytest.mark.parametrize("criterion", CRITERIA.values())
def test_the_global_model_is_a_candidate_wherever_there_is_a_choice(
    criterion: Criterion,
) -> None:
    always_wrong_neighbours = one_neighbour([1, 1, 0])
    assert chosen_weight(always_wrong_neighbours, (0.9, 1.0), criterion) == 0.0


def test_a_single_weight_is_fixed() -> None:
    assert ParameterGrid.of([1.0, 1.0], [1], [1.0]) == ParameterGrid(
        (1.0,), (1,), (1.0,)
    )
    assert ParameterGrid.of([1.0], [1], [1.0]).shape == (1, 1, 1)
    with pytest.raises(ValueError, match="expected at least one"):
        ParameterGrid.of([0.0], [], [1.0])
    assert chosen_weight(one_neighbour([1, 1, 0]), (1.0,)) == 1.0


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
    evidence: Evidence, choice: KnnParameters, criterion: CriterionName
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
    # Of equally good ones few neighbours and a large scale are chosen.
    combinations = [
        KnnParameters(*values)
        for values in itertools.product(GRID, (1, 2, 5), (2.0, 0.3))
    ]
    scores = [separate_score(evidence, values, criterion) for values in combinations]
    rule = CRITERIA[criterion]
    grid = ParameterGrid.of(GRID, (5, 1, 2), (0.3, 2.0))
    chosen = best_parameters(evidence, grid, paper_kernel, rule)
    # max returns the first of several largest, as the ties are meant to go.
    if criterion == "accuracy":
        assert chosen == combinations[scores.index(max(scores))]
    assert scores[combinations.index(chosen)] == pytest.approx(max(scores), abs=1e-5)


@pytest.mark.parametrize("criterion", ["accuracy", "log_loss"])
@settings(max_examples=25, deadline=None)
@given(evidence=evidences(), expected=st.floats(0, 1))
def test_a_prior_without_strength_changes_nothing_and_a_strong_one_decides(
    criterion: CriterionName, evidence: Evidence, expected: float
) -> None:
    rule = CRITERIA[criterion]
    assert chosen_weight(evidence, GRID, rule, Prior(expected, 0.0)) == chosen_weight(
        evidence, GRID, rule
    )
    chosen = chosen_weight(evidence, GRID, rule, Prior(expected, 1e9))
    scores = [
        separate_score(evidence, KnnParameters(knn_weight, 1, 1.0), criterion)
        for knn_weight in GRID
    ]
    scored = zip(GRID, scores, strict=True)
    allowed = [
        weight for weight, knn_weight in scored if knn_weight >= scores[0] - 1e-9
    ]
    distance = min(abs(weight - expected) for weight in allowed)
    assert abs(chosen - expected) == pytest.approx(distance, abs=1e-6)


def test_prior_strength_counts_as_examples() -> None:
    # Two of three are right from 0.5 on, one below 0.3, so that one example decides
    # between 0.1 and 0.5; 1 - (0.5 - 0.1)^2 s = 0 at s = 6.25. At 0.3 two are right.
    evidence = one_neighbour([0, 0, 0])
    weights = (0.0, 0.1, 0.3, 0.5)
    assert [
        separate_score(evidence, KnnParameters(knn_weight, 1, 1.0), "accuracy")
        for knn_weight in weights
    ] == [0, 0, 1, 2]
    chosen = [
        chosen_weight(evidence, weights, num_correct, Prior(0.1, strength))
        for strength in (7.0, 9.0, 24.0, 26.0)
    ]
    # 2 - 0.16 s against 1 - 0.04 s: equal at s = 8.33. Against 0: 0.04 s = 1 at 25.
    assert chosen == [0.5, 0.3, 0.3, 0.1]


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
    grid = ParameterGrid.of(GRID, [1], [1.0, 2.0])
    whole = score(evidence, grid, paper_kernel, num_correct)
    monkeypatch.setattr("knnper.datastore.tuning.NUMBERS_AT_ONCE", 1)
    assert torch.equal(score(evidence, grid, paper_kernel, num_correct), whole)


def queries_of(embeddings: Tensor, labels: Tensor) -> Queries:
    uniform = torch.full((len(labels), NUM_CLASSES), 1 / NUM_CLASSES)
    return Queries(embeddings, uniform, labels)


def drawn(seed: int, count: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Return representations on a small lattice, many of them equal, and labels."""
    generator = RandomKey(seed).numpy()
    embeddings = torch.from_numpy(generator.integers(0, num_values, (count, 2)))
    labels = torch.from_numpy(generator.integers(0, NUM_CLASSES, count))
    return embeddings.float(), labels


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 25),
    num_values=st.integers(1, 4),
    num_neighbors=st.integers(1, 30),
)
def test_leaving_one_out_equals_as_many_stores_without_it(
    seed: int, count: int, num_values: int, num_neighbors: int
) -> None:
    embeddings, labels = drawn(seed, count, num_values)
    store = memory_store(embeddings, labels, NUM_CLASSES)
    evidence = left_one_out(
        store,
        queries_of(embeddings, labels),
        torch.from_numpy(store.contents().ids),
        num_neighbors,
    )
    assert evidence.neighbor_labels.shape == (count, min(num_neighbors, count - 1))
    for row in range(count):
        others = torch.arange(count) != row
        without = memory_store(embeddings[others], labels[others], NUM_CLASSES)
        neighbors = without.search(embeddings[row : row + 1], num_neighbors)
        assert torch.equal(
            evidence.squared_distances[row], neighbors.squared_distances[0]
        )
        assert torch.equal(evidence.neighbor_labels[row], neighbors.labels[0])


def test_some_of_the_stored_examples_may_be_left_out() -> None:
    embeddings, labels = drawn(3, 20, 3)
    store = memory_store(embeddings, labels, NUM_CLASSES)
    ids = torch.tensor([17, 4])
    every = left_one_out(store, queries_of(embeddings, labels), torch.arange(1, 21), 5)
    some = left_one_out(store, queries_of(embeddings[ids], labels[ids]), ids + 1, 5)
    assert torch.equal(some.squared_distances, every.squared_distances[ids])
    assert torch.equal(some.neighbor_labels, every.neighbor_labels[ids])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_stored_examples_are_no_evidence(count: int) -> None:
    embeddings, labels = drawn(1, count, 3)
    store = memory_store(embeddings, labels, NUM_CLASSES)
    queries = queries_of(embeddings, labels)
    assert (
        len(left_one_out(store, queries, torch.from_numpy(store.contents().ids), 5))
        == 0
    )


def test_examples_outside_the_store_are_searched_as_they_are() -> None:
    embeddings, labels = drawn(2, 20, 3)
    store = memory_store(embeddings[:15], labels[:15], NUM_CLASSES)
    evidence = held_out(store, queries_of(embeddings[15:], labels[15:]), 4)
    neighbors = store.search(embeddings[15:], 4)
    assert len(evidence) == 5
    nothing = memory_store(embeddings[:0], labels[:0], NUM_CLASSES)
    assert len(held_out(nothing, queries_of(embeddings, labels), 4)) == 0
    assert torch.equal(evidence.squared_distances, neighbors.squared_distances)
    assert torch.equal(evidence.neighbor_labels, neighbors.labels)


def test_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="pass logits through a softmax first"):
        Queries(torch.zeros((1, 2)), torch.tensor([[3.0, -1.0]]), torch.tensor([0]))


POINTS = (PriorPoint(1000, 0.9), PriorPoint(10, 0.1))


@pytest.mark.parametrize(
    ("num_examples", "expected"),
    [(10, 0.1), (100, 0.5), (1000, 0.9), (1, 0.1), (0, 0.1), (10**6, 0.9)],
)
def test_between_points_the_weight_is_linear_in_the_logarithm(
    num_examples: int, expected: float
) -> None:
    prior = prior_of_size(POINTS, 3.0, num_examples)
    assert prior.knn_weight == pytest.approx(expected)
    assert prior.strength == 3.0
    assert prior_of_size((), 3.0, num_examples) == NO_PRIOR


def test_clients_of_similar_size_share_a_point() -> None:
    points = weights_by_size([4, 9, 100, 400], [0.0, 0.2, 0.5, 0.7], num_points=2)
    assert [point.num_examples for point in points] == [6, 200]
    assert [point.knn_weight for point in points] == pytest.approx([0.1, 0.6])


def test_the_weight_does_not_fall() -> None:
    assert weights_by_size([0, 5], [1.0, 0.3]) == (PriorPoint(5, 0.3),)
    # 0.6 before 0.3 is pooled to 0.45, which 0.36 still undercuts: the mean of three.
    points = weights_by_size([1, 2, 3, 4, 5], [0.1, 0.6, 0.3, 0.36, 0.9])
    assert [point.knn_weight for point in points] == pytest.approx(
        [0.1, 0.42, 0.42, 0.42, 0.9]
    )


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    seed=st.integers(0, 10_000),
    num_points=st.integers(1, 8),
)
def test_points_rise(sizes: list[int], seed: int, num_points: int) -> None:
    weights = RandomKey(seed).numpy().random(len(sizes)).tolist()
    points = weights_by_size(sizes, weights, num_points)
    assert 1 <= len(points) <= num_points
    found_sizes = [point.num_examples for point in points]
    assert found_sizes == sorted(set(found_sizes))
    rising = [point.knn_weight for point in points]
    assert rising == pytest.approx(sorted(rising))
    assert min(weights) - 1e-9 <= rising[0] <= rising[-1] + 1e-9 <= max(weights) + 2e-9


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1 for 2"):
        weights_by_size([1, 2], [0.5])
    with pytest.raises(ValueError, match="at least one client with examples"):
        weights_by_size([0], [0.5])
    with pytest.raises(ValueError, match="at least one point, found 0"):
        weights_by_size([1], [0.5], 0)
