import numpy as np

from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import IidSettings, iid


def test_sizes_and_labels_are_even() -> None:
    train = np.repeat(np.arange(10), 1000)
    test = np.repeat(np.arange(10), 200)
    assignment = iid(train, test, IidSettings(num_clients=9), RandomKey(0))
    sizes = [len(part) for part in assignment.train]
    assert sorted(sizes) == [1111] * 8 + [1112]
    for part in assignment.train:
        np.testing.assert_allclose(np.bincount(train[part]), 111, atol=45)
    assert max(len(part) for part in assignment.test) < 240
    assert min(len(part) for part in assignment.test) > 204
