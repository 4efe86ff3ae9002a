import numpy as np
import pytest

from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import PathologicalSettings, pathological

LABELS = np.repeat(np.arange(10), 50)
KEY = RandomKey(0)


def settings_of(num_clients: int, classes_per_client: int) -> PathologicalSettings:
    return PathologicalSettings(
        num_clients=num_clients, classes_per_client=classes_per_client
    )


def test_the_samples_of_a_class_are_shared_evenly() -> None:
    # 20 clients with two of ten classes each: every class has four clients.
    assignment = pathological(LABELS, LABELS[::5], settings_of(20, 2), KEY)
    for part in assignment.train:
        counts = np.bincount(LABELS[part], minlength=10)
        assert set(counts.tolist()) <= {0, 12, 13}
        assert np.count_nonzero(counts) == 2
    for part in assignment.test:
        counts = np.bincount(LABELS[::5][part], minlength=10)
        assert set(counts.tolist()) <= {0, 2, 3}


def test_clients_have_many_different_pairs() -> None:
    assignment = pathological(LABELS, LABELS, settings_of(20, 2), KEY)
    pairs = {tuple(np.unique(LABELS[part])) for part in assignment.train}
    assert len(pairs) > 12


def test_more_classes_than_there_are() -> None:
    with pytest.raises(DataError, match="is 11, but the training data has only 10"):
        pathological(LABELS, LABELS, settings_of(5, 11), KEY)


def test_a_class_would_go_to_nobody() -> None:
    with pytest.raises(DataError, match=r"4 clients with 2 .* cannot hold all 10"):
        pathological(LABELS, LABELS, settings_of(4, 2), KEY)


def test_fewer_samples_than_clients() -> None:
    scarce = np.append(LABELS[LABELS != 3], [3, 3])
    with pytest.raises(DataError, match="class 3 has 2 training samples for the 4"):
        pathological(scarce, scarce, settings_of(20, 2), KEY)
