"""What a user's deletions leave of the memory of the stream."""

import numpy as np
import pytest

from knnper.datastore.examples import StreamState
from knnper.datastore.policy import forget

STATE = StreamState(9, np.array([5, 3, 0]), np.array([True, True, False]))


def test_deleted_examples_were_not_seen() -> None:
    after = forget(STATE, np.array([0, 0, 1]))

    assert after.num_offered == 9
    assert after.num_seen.tolist() == [3, 2, 0]
    assert after.was_largest.tolist() == [False, False, False]
    assert STATE.num_seen.tolist() == [5, 3, 0]


def test_a_label_that_lost_nothing_stays_full() -> None:
    after = forget(STATE, np.array([1]))

    assert after.was_largest.tolist() == [True, False, False]


def test_nothing_deleted_changes_nothing() -> None:
    after = forget(STATE, np.empty(0, np.int64))

    assert after.num_seen.tolist() == [5, 3, 0]
    assert after.was_largest.tolist() == [True, True, False]


@pytest.mark.parametrize("labels", [[2], [1, 1, 1, 1], [3]])
def test_more_than_was_seen_cannot_be_forgotten(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"at most \[5, 3, 0\] .* forget each deleted"):
        forget(STATE, np.array(labels))
