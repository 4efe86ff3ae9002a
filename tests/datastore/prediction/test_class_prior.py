"""The global model with a client's own shares of the classes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.prediction import (
    ClassPrior,
    ClassPriorSettings,
    KnnPredictor,
    NeighborClassifier,
    adapted,
    class_ratios,
    reweighted,
)
from knnper.datastore.store import UNNAMED, empty_memory_store
from knnper.errors import ConfigError
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
    own = torch.from_numpy(generator.integers(0, most, (num_rows, num_classes)))
    own *= torch.from_numpy(generator.integers(0, 2, (num_rows, num_classes)))
    strengths = draw(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=4))
    shares = generator.random(num_classes) + 1e-3 if draw(st.booleans()) else ()
    prior = ClassPriorSettings(tuple(strengths), tuple(float(one) for one in shares))
    sharpness = draw(st.sampled_from([0.5, 1.0, 6.0, 50.0]))
    return logits.float().softmax(dim=1), own, ClassPrior(prior, sharpness)


def test_a_known_client() -> None:
    # q = (3 + 1, 1 + 1) / (4 + 2) = (2/3, 1/3) where the federation has (1/2, 1/2).
    one = ClassPriorSettings((2.0,))
    expected = torch.tensor([[4 / 3, 2 / 3]], dtype=torch.float64)
    torch.testing.assert_close(class_ratios(counts(3, 1), one), expected)

    # (0.4 4/3, 0.6 2/3) = (8, 6) / 15
    found = adapted(HALVES, counts(3, 1), ClassPrior(one))
    torch.testing.assert_close(found, torch.tensor([[4 / 7, 3 / 7]]))


def test_the_federations_shares_may_be_counts() -> None:
    # π = (3/4, 1/4), so that q = (1 + 3, 1 + 1) / (2 + 4) = (2/3, 1/3).
    found = class_ratios(counts(1, 1), ClassPriorSettings((4.0,), (30.0, 10.0)))
    expected = torch.tensor([[8 / 9, 4 / 3]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_of_several_strengths_the_probable_ones_count() -> None:
    # The second label is the first one's again with 2/3 for s = 2, with 3/5 for s = 4:
    # these weigh 10 to 9, and make the class's share 3/4 and 2/3.
    found = class_ratios(counts(2, 0), ClassPriorSettings((2.0, 4.0)))
    share = (10 * 3 / 4 + 9 * 2 / 3) / 19
    expected = torch.tensor([[2 * share, 2 - 2 * share]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_labels_as_everywhere_move_less_than_labels_of_one_class() -> None:
    several = ClassPriorSettings(STRENGTHS)
    even, skewed = class_ratios(torch.tensor([[6, 5, 4, 5], [20, 0, 0, 0]]), several)
    assert (even - 1).abs().max() < 0.1
    assert skewed[0] > 3.5
    # One strength takes both for the same evidence: (6 + 1/4) / (20 + 1) of 1/4.
    alone = class_ratios(counts(6, 5, 4, 5), ClassPriorSettings((1.0,)))[0, 0]
    assert float(alone) == pytest.approx(4 * 6.25 / 21)


@settings(max_examples=60, deadline=None)
@given(clients())
def test_rows_sum_to_one(client: tuple[Tensor, Tensor, ClassPrior]) -> None:
    probabilities, own, chosen = client
    found = adapted(probabilities, own, chosen)

    assert (found.shape, found.dtype) == (probabilities.shape, torch.float32)
    assert bool(torch.isfinite(found).all())
    assert bool((found >= 0).all())
    ones = torch.ones(len(found))
    torch.testing.assert_close(found.sum(dim=1), ones)
    without = own.sum(dim=1) == 0
    assert torch.equal(found[without], probabilities[without])


@settings(max_examples=40, deadline=None)
@given(clients())
def test_the_names_of_the_classes_do_not_matter(
    client: tuple[Tensor, Tensor, ClassPrior],
) -> None:
    probabilities, own, chosen = client
    generator = RandomKey(own.shape[1]).numpy()
    order = torch.from_numpy(generator.permutation(own.shape[1]))
    shares = chosen.settings.class_shares
    moved = replace(
        chosen.settings,
        class_shares=tuple(shares[one] for one in order.tolist()) if shares else (),
    )

    found = adapted(
        probabilities[:, order], own[:, order], ClassPrior(moved, chosen.sharpness)
    )
    expected = adapted(probabilities, own, chosen)[:, order]
    torch.testing.assert_close(found, expected)


def test_a_sharper_model_is_outvoted_less() -> None:
    # (0.4² 4/3, 0.6² 2/3) = (0.64, 0.72) / 3
    found = reweighted(HALVES, torch.tensor([[4 / 3, 2 / 3]]), 2.0)
    torch.testing.assert_close(found, torch.tensor([[0.64 / 1.36, 0.72 / 1.36]]))


def test_without_examples_it_is_the_global_model_to_the_last_bit() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]])
    chosen = ClassPrior(ClassPriorSettings(STRENGTHS, (0.1, 0.3, 0.6)), 3.0)
    assert torch.equal(adapted(probabilities, counts(0, 0, 0), chosen), probabilities)


def test_a_client_of_one_class_leaves_the_others_possible() -> None:
    prior = ClassPrior(ClassPriorSettings(STRENGTHS))
    found = adapted(HALVES, counts(1000, 0), prior)
    assert 0 < float(found[0, 1]) < 0.01


def test_shares_of_other_classes_are_refused() -> None:
    wrong = ClassPriorSettings((1.0,), (0.5, 0.3, 0.2))
    with pytest.raises(ConfigError, match=r"class_shares: expected 2 numbers.*found 3"):
        class_ratios(counts(1, 0), wrong)


def test_the_prediction_follows_what_is_stored() -> None:
    store = empty_memory_store(StoreSpec(2), 1, UNNAMED)
    predictor = KnnPredictor(
        embed=lambda images: images.float(),
        head=lambda embeddings: HALVES.expand(len(embeddings), 2),
        neighbors=NeighborClassifier(store, 1, "paper", 1.0),
        knn_weight=0.0,
        class_prior=ClassPrior(ClassPriorSettings((2.0,))),
    )
    asked = torch.zeros((3, 1))
    assert torch.equal(predictor(asked), HALVES.expand(3, 2))

    store.add(NewExamples(torch.zeros((4, 1)), torch.tensor([0, 0, 0, 1])))
    expected = torch.tensor([[4 / 7, 3 / 7]]).expand(3, 2)
    torch.testing.assert_close(predictor(asked), expected)
