import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.seeding import RandomKey
from knnper.strategies.core.clusters import clusters


@pytest.mark.parametrize("seed", range(5))
def test_groups_far_apart_are_found(seed: int) -> None:
    points = torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8], [-9, 5], [8, 9]])
    found = clusters(points, 3, RandomKey(seed)).tolist()
    groups = {tuple(i for i in range(6) if found[i] == k) for k in range(3)}
    assert groups == {(0, 2), (1, 3, 5), (4,)}


@pytest.mark.parametrize("seed", range(4))
def test_every_point_is_with_the_nearest_mean(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(30, 3, generator=generator)
    found = clusters(points, 4, RandomKey(seed))
    means = torch.stack([points[found == k].mean(dim=0) for k in range(4)])
    assert torch.equal(torch.cdist(points, means).argmin(dim=1), found)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=1, max_size=8),
    count=st.integers(1, 8),
    seed=st.integers(0, 5),
)
def test_no_cluster_is_empty(values: list[float], count: int, seed: int) -> None:
    points = torch.tensor(values)[:, None]
    if len(points) < count:
        with pytest.raises(ValueError, match=f"expected at least {count} points"):
            clusters(points, count, RandomKey(seed))
        return
    found = clusters(points, count, RandomKey(seed))
    assert sorted(set(found.tolist())) == list(range(count))
    assert torch.equal(found, clusters(points, count, RandomKey(seed)))
