"""Mean and standard deviation of each channel."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_PIXELS_AT_ONCE = 2**20


def channel_statistics(
    parts: Iterable[NDArray[np.uint8]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of pixels scaled to [0, 1].

    Parameters
    ----------
    parts
        Some of the images each, uint8 of shape (n, height, width, channels); one image
        at least in all.

    Notes
    -----
    Computed from exact histograms, so that it does not depend on the parts. A channel
    that never varies gets a standard deviation of 1, so that it can be divided by.
    """
    histograms = np.sum([_histograms(part) for part in parts], axis=0)
    weights = histograms / histograms.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255.0
    means = weights @ values
    variances = (weights * (values - means[:, None]) ** 2).sum(axis=1)
    constant = np.count_nonzero(histograms, axis=1) == 1
    deviations = np.where(constant, 1.0, np.sqrt(variances))
    return tuple(means.tolist()), tuple(deviations.tolist())


def _histograms(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count each of the 256 values in each channel; shape (channels, 256)."""
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for channel in range(channels):
        pixels = images[..., channel].ravel()
        # NumPy counts a copy in which each pixel takes eight bytes.
        for start in range(0, len(pixels), _PIXELS_AT_ONCE):
            some = pixels[start : start + _PIXELS_AT_ONCE]
            counts[channel] += np.bincount(some, minlength=256)
    return counts
