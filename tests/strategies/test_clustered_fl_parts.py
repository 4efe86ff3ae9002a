"""Which updates part a cluster, and into how many clusters that can lead."""

import pytest
import torch
from torch import Tensor

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.clustered_fl import (
    ClusteredFL,
    ClusteredFLSettings,
    ClustersState,
)
from knnper.strategies.core.clusters import ClusterUpdate
from tests.strategies.trained_methods import MakeTask

ALWAYS = ClusteredFLSettings(mean_norm_tolerance=100.0, client_norm_tolerance=0.0)


def update(weights: Tensor, cluster: int = 0) -> ClusterUpdate:
    return ClusterUpdate(weights, 1, 0.5, cluster)


def parallel(num_clients: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return a model, and what updates of one direction make of it, rounded."""
    with RandomKey(seed).torch():
        start, direction = torch.randn(300), torch.randn(300)
        lengths = torch.rand(num_clients) + 0.1
    return start, [start + length * direction for length in lengths]


@pytest.mark.parametrize("seed", range(8))
def test_parallel_updates_are_one_cluster_whatever_their_rounding(
    linear_task: MakeTask, seed: int
) -> None:
    task = linear_task(TrainingSettings(), num_pixels=150)
    method = ClusteredFL(task, ALWAYS)
    start, models = parallel(5, seed)
    before = ClustersState((start,), {})
    updates = [(str(number), update(model)) for number, model in enumerate(models)]
    assert len(method.aggregate(before, iter(updates)).models) == 1
    # A hundredth of a right angle away is another direction.
    turned = start + (models[4] - start).roll(1) * 0.02 + (models[4] - start)
    updates[4] = ("4", update(turned))
    state = method.aggregate(before, iter(updates))
    assert state.cluster_of == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 1}


@pytest.mark.parametrize(("least", "most"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1)])
def test_the_number_of_clusters_is_bounded_by_their_size(
    linear_task: MakeTask, least: int, most: int
) -> None:
    settings = ClusteredFLSettings(1e6, 0.0, min_cluster_size=least)
    method = ClusteredFL(linear_task(TrainingSettings(), num_pixels=4), settings)
    state, generator = method.init((), RandomKey(1)), RandomKey(2).numpy()
    names = [f"client {number}" for number in range(8)]
    for _ in range(8):
        vectors = generator.normal(size=(8, 8)).astype("float32")
        updates = [
            (name, update(torch.from_numpy(vector), cluster=number % 2))
            for number, (name, vector) in enumerate(zip(names, vectors, strict=True))
        ]
        state = method.aggregate(state, iter(updates))
        assert len(state.models) <= most
