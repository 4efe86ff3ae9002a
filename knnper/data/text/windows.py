"""Windows of a text, each with the character that follows it."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray


def target_positions(
    num_characters: int, window: int, stride: int
) -> NDArray[np.int64]:
    """Return which characters of a text are predicted, int64 of shape (n,).

    Parameters
    ----------
    num_characters
        Length of the text.
    window
        T, how many characters must come before: the first target has the position T.
    stride
        From one target to the next.
    """
    return np.arange(window, num_characters, stride, dtype=np.int64)


def windows_before(
    ids: NDArray[np.uint8], targets: NDArray[np.int64], window: int
) -> NDArray[np.uint8]:
    """Return the characters before each target, uint8 of shape (n, 1, 1, T).

    Parameters
    ----------
    ids
        The text's characters, uint8 of shape (num_characters,).
    targets
        Positions in it, int64 of shape (n,), none smaller than ``window``.
    window
        T.
    """
    if len(targets) == 0:
        return np.empty((0, 1, 1, window), dtype=np.uint8)
    found: NDArray[np.uint8] = sliding_window_view(ids, window)[targets - window]
    return found[:, None, None, :]
