"""The global model with a client's own shares of the classes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.class_prior import (
    ClassPrior,
    ClassPriorSettings,
    adapt_probabilities,
    class_ratios,
    label_information,
    reweight_classes,
)
from knnper.datastore.memory import CriterionName
from knnper.datastore.prediction import paper_kernel
from knnper.datastore.tuning import (
    CRITERIA,
    Evidence,
    ParameterGrid,
    Prior,
    Queries,
    best_parameters,
    choose_class_prior,
    num_correct,
    score,
)
from knnper.seeding import RandomKey

STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
HALVES = torch.tensor([[0.4, 0.6]])


def counts(*of_classes: int) -> Tensor:
    return torch.tensor([of_classes])


@st.composite
def clients(draw: st.DrawFn) -> tuple[Tensor, Tensor, ClassPrior]:
    """Return probabilities with zeros among them, any counts, and a class prior."""
    num_rows, num_classes = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    generator = RandomKey(draw(st.integers(0, 10_000))).numpy()
    logits = 40 * torch.from_numpy(generator.normal(size=(num_rows, num_classes)))
    most = draw(st.sampled_from([1, 3, 1_000_000]))
    label_counts = torch.from_numpy(
        generator.integers(0, most, (num_rows, num_classes))
    )
    label_counts *= torch.from_numpy(generator.integers(0, 2, (num_rows, num_classes)))
    strengths = draw(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=4))
    shares = generator.random(num_classes) + 1e-3 if draw(st.booleans()) else ()
    prior = ClassPriorSettings(
        tuple(strengths), tuple(float(share) for share in shares)
    )
    sharpness = draw(st.sampled_from([0.5, 1.0, 6.0, 50.0]))
    return logits.float().softmax(dim=1), label_counts, ClassPrior(prior, sharpness)


def test_a_known_client() -> None:
    # q = (3 + 1, 1 + 1) / (4 + 2) = (2/3, 1/3) where the federation has (1/2, 1/2).
    prior = ClassPriorSettings((2.0,))
    expected = torch.tensor([[4 / 3, 2 / 3]], dtype=torch.float64)
    torch.testing.assert_close(class_ratios(counts(3, 1), prior), expected)
    # (0.4 4/3, 0.6 2/3) = (8, 6) / 15
    adapted = adapt_probabilities(HALVES, counts(3, 1), ClassPrior(prior))
    torch.testing.assert_close(adapted, torch.tensor([[4 / 7, 3 / 7]]))


def test_the_federations_shares_may_be_counts() -> None:
    # π = (3/4, 1/4), so that q = (1 + 3, 1 + 1) / (2 + 4) = (2/3, 1/3).
    ratios = class_ratios(counts(1, 1), ClassPriorSettings((4.0,), (30.0, 10.0)))
    expected = torch.tensor([[8 / 9, 4 / 3]], dtype=torch.float64)
    torch.testing.assert_close(ratios, expected)


def test_strengths_count_by_their_probability() -> None:
    # The second label is the first one's again with 2/3 for s = 2, with 3/5 for s = 4:
    # these weigh 10 to 9, and make the class's share 3/4 and 2/3.
    ratios = class_ratios(counts(2, 0), ClassPriorSettings((2.0, 4.0)))
    share = (10 * 3 / 4 + 9 * 2 / 3) / 19
    expected = torch.tensor([[2 * share, 2 - 2 * share]], dtype=torch.float64)
    torch.testing.assert_close(ratios, expected)


@settings(max_examples=60, deadline=None)
@given(clients())
def test_rows_sum_to_one_whatever_the_classes_are_called(
    client: tuple[Tensor, Tensor, ClassPrior],
) -> None:
    probabilities, label_counts, chosen = client
    adapted = adapt_probabilities(probabilities, label_counts, chosen)
    assert (adapted.shape, adapted.dtype) == (probabilities.shape, torch.float32)
    assert bool(torch.isfinite(adapted).all())
    assert bool((adapted >= 0).all())
    torch.testing.assert_close(adapted.sum(dim=1), torch.ones(len(adapted)))
    without = label_counts.sum(dim=1) == 0
    assert torch.equal(adapted[without], probabilities[without])
    order = torch.from_numpy(
        RandomKey(label_counts.shape[1]).numpy().permutation(label_counts.shape[1])
    )
    shares = chosen.settings.class_shares
    moved = tuple(shares[label] for label in order.tolist()) if shares else ()
    other = replace(chosen, settings=replace(chosen.settings, class_shares=moved))
    again = adapt_probabilities(probabilities[:, order], label_counts[:, order], other)
    torch.testing.assert_close(again, adapted[:, order])


def test_a_sharper_model_is_outvoted_less() -> None:
    # (0.4² 4/3, 0.6² 2/3) = (0.64, 0.72) / 3
    reweighted = reweight_classes(HALVES, torch.tensor([[4 / 3, 2 / 3]]), 2.0)
    torch.testing.assert_close(reweighted, torch.tensor([[0.64 / 1.36, 0.72 / 1.36]]))


PRIOR = ClassPrior(ClassPriorSettings((1.0,)))
ALONE = ParameterGrid.of([0.0], [1], [1.0])
GRID = ParameterGrid.of([0.0, 0.3, 0.7, 1.0], [1], [1.0])


def evidence_of(
    probabilities: list[list[float]],
    labels: list[int],
    ratios: list[float],
    neighbors: list[int],
) -> Evidence:
    """Return queries with one neighbour each."""
    queries = Queries(
        torch.zeros((len(labels), 2)),
        torch.tensor(probabilities),
        torch.tensor(labels),
        torch.tensor([ratios], dtype=torch.float64),
    )
    distances = torch.ones((len(labels), 1), dtype=torch.float64)
    return Evidence(queries, distances, torch.tensor(neighbors)[:, None])


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([2.0, 0.5], PRIOR), ([0.5, 2.0], None), ([1.0, 1.0], PRIOR)],
)
def test_it_is_used_where_it_scores_no_worse(
    ratios: list[float], expected: ClassPrior | None
) -> None:
    # Neighbours are always wrong, and the model is right of the first.
    evidence = evidence_of([[0.6, 0.4], [0.4, 0.6]], [0, 0], ratios, [1, 1])
    chosen = best_parameters(
        evidence, GRID, paper_kernel, num_correct, class_prior=PRIOR
    )
    assert (chosen.class_prior, chosen.knn_weight) == (expected, 0.0)


def test_it_is_not_used_where_the_neighbours_do_better_without() -> None:
    # 0.3 of the neighbours corrects the model as it is, but not the adapted one.
    evidence = evidence_of([[0.45, 0.55], [0.3, 0.7]], [0, 1], [0.2, 3.0], [0, 1])
    grid = ParameterGrid.of([0.0, 0.3], [1], [1.0])
    chosen = best_parameters(
        evidence, grid, paper_kernel, num_correct, class_prior=PRIOR
    )
    assert (chosen.class_prior, chosen.knn_weight) == (None, 0.3)


def test_ties_in_accuracy_go_to_the_surer_choice() -> None:
    evidence = evidence_of([[0.6, 0.4], [0.6, 0.4]], [0, 0], [1.0, 1.0], [0, 0])
    chosen = [
        best_parameters(evidence, GRID, paper_kernel, CRITERIA[name]).knn_weight
        for name in ("accuracy", "both")
    ]
    assert chosen == [0.0, 1.0]
    scores = score(evidence, ALONE, paper_kernel, CRITERIA["both"])
    expected = 2 + 0.01 * 2 * torch.tensor(0.6).log()
    assert float(scores) == pytest.approx(float(expected))


def test_the_sharpness_is_the_most_probable_one() -> None:
    # Of 20 examples 16 are right at 0.6: log p is largest at odds of 4, which is
    # β = log 4 / log 1.5 = 3.4. The prior takes log(3)²/2 = 0.6 nats of 1.
    labels = [0] * 16 + [1] * 4
    evidence = evidence_of([[0.6, 0.4]] * 20, labels, [1.0, 1.0], [0] * 20)
    grid = (1.0, 2.0, 3.0, 6.0)
    posteriors = []
    for value in grid:
        odds = 1.5**value
        right, wrong = odds / (1 + odds), 1 / (1 + odds)
        log = torch.tensor([right, wrong, value], dtype=torch.float64).log()
        posteriors.append(float(16 * log[0] + 4 * log[1] - log[2] ** 2 / 2))
    best = grid[posteriors.index(max(posteriors))]
    prior = ClassPriorSettings((1.0,), sharpness=grid)
    assert choose_class_prior(evidence, prior) == ClassPrior(prior, best)
    assert best == 3.0


def test_without_evidence_the_sharpness_is_the_closest_to_one() -> None:
    # All 20 are right, but the store had nothing to find: they say nothing of it.
    scored = evidence_of([[0.6, 0.4]] * 20, [0] * 20, [1.0, 1.0], [0] * 20)
    nothing = torch.empty((20, 0), dtype=torch.float64)
    unscored = Evidence(scored.queries, nothing, nothing.long())
    grid = ClassPriorSettings((1.0,), sharpness=(0.5, 1.25, 6.0))
    assert choose_class_prior(scored, grid) == ClassPrior(grid, 6.0)
    assert choose_class_prior(unscored, grid) == ClassPrior(grid, 1.25)
    assert choose_class_prior(scored, ClassPriorSettings(sharpness=(2.0,))) is None


@pytest.mark.parametrize("criterion", ["accuracy", "log_loss", "both"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    expected=st.floats(0, 1),
    sharpness=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_no_client_does_worse_on_its_evidence_than_with_the_global_model(
    criterion: CriterionName, seed: int, count: int, expected: float, sharpness: float
) -> None:
    generator = RandomKey(seed).numpy()
    evidence = evidence_of(
        generator.dirichlet([0.5] * 3, count).tolist(),
        generator.integers(0, 3, count).tolist(),
        generator.gamma(0.5, size=3).clip(0.01).tolist(),
        generator.integers(0, 3, count).tolist(),
    )
    prior, rule = replace(PRIOR, sharpness=sharpness), CRITERIA[criterion]
    expects = Prior(expected, 20.0)
    chosen = best_parameters(evidence, GRID, paper_kernel, rule, expects, prior)
    seen = evidence if chosen.class_prior is None else evidence.adapted(sharpness)
    only = ParameterGrid.of([chosen.knn_weight], [1], [1.0])
    served = score(seen, only, paper_kernel, rule)
    before = score(evidence, ALONE, paper_kernel, rule)
    assert float(served) >= float(before) - 1e-9


@pytest.mark.parametrize(
    ("label_counts", "expected"),
    [
        # A single example has no others to learn from, and an empty client no example.
        ([[1, 0], [0, 1], [0, 0]], 0.0),
        ([[0, 0]], 0.0),
        # Clients that know their label gain log(1 / (1/2)).
        ([[10_000, 0], [0, 10_000]], math.log(2)),
        ([[5_000, 5_000]] * 2, 0.0),
    ],
)
def test_what_labels_tell(label_counts: list[list[int]], expected: float) -> None:
    information = label_information(torch.tensor(label_counts))
    assert information == pytest.approx(expected, abs=0.001)


def test_what_labels_tell_example_by_example() -> None:
    label_counts = torch.from_numpy(RandomKey(1).numpy().integers(0, 4, (5, 3)))
    shares = tuple(float(share) for share in label_counts.sum(dim=0))
    gains = []
    for client_counts in label_counts:
        for label in torch.repeat_interleave(torch.arange(3), client_counts).tolist():
            others = client_counts.clone()
            others[label] -= 1
            prior = ClassPriorSettings(STRENGTHS, shares)
            gains.append(math.log(class_ratios(others[None], prior)[0, label]))
    expected = sum(gains) / len(gains)
    assert label_information(label_counts) == pytest.approx(expected)
