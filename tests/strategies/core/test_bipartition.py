import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.strategies.core import clusters as module
from knnper.strategies.core.clusters import bipartition, cosines


def largest_crossing(similarities: Tensor, first: set[int]) -> float:
    second = set(range(len(similarities))) - first
    return max(float(similarities[i, k]) for i in first for k in second)


def best_of_all(similarities: Tensor) -> float:
    """Return the smallest largest crossing over all bipartitions, by trying them."""
    others = range(1, len(similarities))
    firsts = [
        {0, *chosen}
        for size in range(len(others))
        for chosen in itertools.combinations(others, size)
    ]
    return min(largest_crossing(similarities, first) for first in firsts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 7).flatmap(
        lambda n: st.lists(
            st.integers(-4, 4), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2
        )
    )
)
def test_no_bipartition_is_better(entries: list[int]) -> None:
    num_members = int((1 + (1 + 8 * len(entries)) ** 0.5) / 2)
    similarities = torch.ones(num_members, num_members)
    pairs = itertools.combinations(range(num_members), 2)
    for (i, k), entry in zip(pairs, entries, strict=True):
        similarities[i, k] = similarities[k, i] = entry / 4

    found = bipartition(similarities)

    assert 0 in found.first
    assert found.second
    assert sorted(found.first + found.second) == list(range(num_members))
    assert found.cross_similarity == best_of_all(similarities)
    crossing = largest_crossing(similarities, set(found.first))
    assert crossing == found.cross_similarity


def test_a_chain_holds_together() -> None:
    # 0 and 2 are far apart, but each is near 1; 3 is near nobody.
    similarities = torch.tensor(
        [
            [1.0, 0.9, -0.9, -0.5],
            [0.9, 1.0, 0.8, -0.2],
            [-0.9, 0.8, 1.0, -0.4],
            [-0.5, -0.2, -0.4, 1.0],
        ]
    )
    found = bipartition(similarities)
    assert (set(found.first), found.second) == ({0, 1, 2}, (3,))
    assert found.cross_similarity == pytest.approx(-0.2)


def test_one_member_cannot_be_parted() -> None:
    with pytest.raises(ValueError, match="expected at least 2 members to part, found"):
        bipartition(torch.ones(1, 1))


def test_cosines_by_hand() -> None:
    vectors = torch.tensor([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]])
    expected = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    assert cosines(vectors).tolist() == [*expected, [0.0] * 4]


def test_cosines_are_exact_and_the_same_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    scaled = torch.cat([vectors, 3 * vectors])
    whole = cosines(scaled)
    exact = torch.nn.functional.cosine_similarity(
        scaled.double()[:, None], scaled.double()[None], dim=-1
    )
    torch.testing.assert_close(whole, exact, rtol=0, atol=1e-14)
    monkeypatch.setattr(module, "_SLICE", 7)
    torch.testing.assert_close(cosines(scaled), whole, rtol=0, atol=1e-14)
