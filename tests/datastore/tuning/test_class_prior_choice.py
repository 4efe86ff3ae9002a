"""With or without the class prior: whatever predicts a client's examples best."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.prediction import ClassPrior, ClassPriorSettings, paper_kernel
from knnper.datastore.tuning import (
    CRITERIA,
    CriterionName,
    Evidence,
    Prior,
    Queries,
    candidates,
    choose,
    choose_class_prior,
    num_correct,
    score,
)
from knnper.seeding import RandomKey

PRIOR = ClassPrior(ClassPriorSettings((1.0,)))
ALONE = candidates([0.0], [1], [1.0])
GRID = candidates([0.0, 0.3, 0.7, 1.0], [1], [1.0])


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
    found = evidence_of([[0.6, 0.4], [0.4, 0.6]], [0, 0], ratios, [1, 1])
    chosen = choose(found, GRID, paper_kernel, num_correct, class_prior=PRIOR)
    assert (chosen.class_prior, chosen.knn_weight) == (expected, 0.0)


def test_it_is_not_used_where_the_neighbours_do_better_without() -> None:
    # 0.3 of the neighbours corrects the model as it is, but not the adapted one.
    found = evidence_of([[0.45, 0.55], [0.3, 0.7]], [0, 1], [0.2, 3.0], [0, 1])
    grid = candidates([0.0, 0.3], [1], [1.0])
    chosen = choose(found, grid, paper_kernel, num_correct, class_prior=PRIOR)
    assert (chosen.class_prior, chosen.knn_weight) == (None, 0.3)


def test_of_equally_many_right_ones_the_surer_counts() -> None:
    found = evidence_of([[0.6, 0.4], [0.6, 0.4]], [0, 0], [1.0, 1.0], [0, 0])
    chosen = [
        choose(found, GRID, paper_kernel, CRITERIA[name]).knn_weight
        for name in ("accuracy", "both")
    ]
    assert chosen == [0.0, 1.0]
    scores = score(found, ALONE, paper_kernel, CRITERIA["both"])
    expected = 2 + 0.01 * 2 * torch.tensor(0.6).log()
    assert float(scores) == pytest.approx(float(expected))


def test_the_sharpness_is_the_most_probable_one() -> None:
    # Of 20 examples 16 are right at 0.6: log p is largest at odds of 4, which is
    # β = log 4 / log 1.5 = 3.4. The prior takes log(3)²/2 = 0.6 nats of 1.
    labels = [0] * 16 + [1] * 4
    found = evidence_of([[0.6, 0.4]] * 20, labels, [1.0, 1.0], [0] * 20)
    grid = (1.0, 2.0, 3.0, 6.0)
    posteriors = []
    for value in grid:
        odds = 1.5**value
        right, wrong = odds / (1 + odds), 1 / (1 + odds)
        log = torch.tensor([right, wrong, value], dtype=torch.float64).log()
        posteriors.append(float(16 * log[0] + 4 * log[1] - log[2] ** 2 / 2))
    best = grid[posteriors.index(max(posteriors))]

    chosen = choose_class_prior(found, ClassPriorSettings((1.0,), sharpness=grid))
    assert chosen is not None
    assert chosen.sharpness == best == 3.0


def test_without_evidence_the_sharpness_is_the_closest_to_one() -> None:
    # All 20 are right, but the store had nothing to find: they say nothing of it.
    scored = evidence_of([[0.6, 0.4]] * 20, [0] * 20, [1.0, 1.0], [0] * 20)
    nothing = torch.empty((20, 0), dtype=torch.float64)
    unscored = Evidence(scored.queries, nothing, nothing.long())
    settings_ = ClassPriorSettings((1.0,), sharpness=(0.5, 1.25, 6.0))

    of_all, of_none = (choose_class_prior(one, settings_) for one in (scored, unscored))
    assert of_all is not None
    assert of_none is not None
    assert (of_all.sharpness, of_none.sharpness) == (6.0, 1.25)


def test_without_a_strength_there_is_no_class_prior() -> None:
    found = evidence_of([[0.6, 0.4]], [0], [1.0, 1.0], [0])
    assert choose_class_prior(found, ClassPriorSettings(sharpness=(2.0,))) is None


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
    found = evidence_of(
        generator.dirichlet([0.5] * 3, count).tolist(),
        generator.integers(0, 3, count).tolist(),
        generator.gamma(0.5, size=3).clip(0.01).tolist(),
        generator.integers(0, 3, count).tolist(),
    )
    prior, rule = replace(PRIOR, sharpness=sharpness), CRITERIA[criterion]
    expects = Prior(expected, 20.0)
    chosen = choose(found, GRID, paper_kernel, rule, expects, prior)

    seen = found if chosen.class_prior is None else found.adapted(sharpness)
    only = candidates([chosen.knn_weight], [1], [1.0])
    served = score(seen, only, paper_kernel, rule)
    before = score(found, ALONE, paper_kernel, rule)
    assert float(served) >= float(before) - 1e-9
