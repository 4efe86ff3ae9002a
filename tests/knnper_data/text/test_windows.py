"""Windows of text: what is predicted, and from what."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.text import target_positions, windows_before


def test_windows_by_hand() -> None:
    ids = np.array([10, 11, 12, 13, 14, 15, 16], dtype=np.uint8)
    targets = target_positions(7, window=3, stride=2)
    assert targets.tolist() == [3, 5]
    found = windows_before(ids, targets, 3)
    assert found.shape == (2, 1, 1, 3)
    assert found.reshape(2, 3).tolist() == [[10, 11, 12], [12, 13, 14]]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 60),
    window=st.integers(1, 12),
    stride=st.integers(1, 15),
)
def test_every_window_ends_before_its_target(
    length: int, window: int, stride: int
) -> None:
    ids = np.arange(length, dtype=np.uint8)
    targets = target_positions(length, window, stride)
    found = windows_before(ids, targets, window)
    assert found.shape == (len(targets), 1, 1, window)
    assert len(targets) == max(0, -(-(length - window) // stride))
    for row, target in zip(found.reshape(-1, window), targets, strict=True):
        assert row.tolist() == list(range(target - window, target))
    if len(targets):
        assert targets[0] == window
        assert set(np.diff(targets).tolist()) <= {stride}
