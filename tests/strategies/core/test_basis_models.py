import torch

from knnper.seeding import RandomKey
from knnper.strategies.core.bases import BasesUpdate, clustered, mean_models


def update(*values: float, num_examples: int = 1) -> BasesUpdate:
    return BasesUpdate((torch.tensor(values),), num_examples, 0.5)


def test_models_are_averaged_by_their_examples() -> None:
    two = BasesUpdate((torch.tensor([4.0]), torch.tensor([8.0])), 3, 0.5)
    one = BasesUpdate((torch.tensor([0.0]), torch.tensor([-8.0])), 1, 0.5)
    assert [mean.tolist() for mean in mean_models([two, one])] == [[3.0], [4.0]]


def test_buffers_are_averaged_and_not_compared() -> None:
    # Two parameters and a buffer, which alone would pair the first with the third.
    updates = [
        update(0.0, 0.0, 900.0),
        update(0.0, 1.0, -900.0, num_examples=3),
        update(9.0, 9.0, 900.0),
    ]
    center = torch.tensor([3.0, 3.0])
    found = clustered(updates, center, 2, RandomKey(0))
    assert sorted(mean.tolist() for mean in found) == [[0, 0.75, -450], [9, 9, 900]]
