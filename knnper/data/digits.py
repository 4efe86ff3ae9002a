"""The 1,797 handwritten digits (8x8) that come with scikit-learn."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter
from knnper.data.dataset import Dataset

TEST_FRACTION = 0.25  # of each class; scikit-learn ships no official split
_SPLIT_KEY = RandomKey(0, ("digits", "test"))
_LARGEST_VALUE = 16
CLASS_NAMES = tuple(str(digit) for digit in range(10))


@dataclass(frozen=True)
class DigitsSettings(Settings):
    """The data set has no settings."""


def load_digits(settings: DigitsSettings) -> Dataset:  # noqa: ARG001
    """Return the digits, images of shape (8, 8, 1), ten classes.

    The split is the same in every experiment: `TEST_FRACTION` of each class is test
    data. Values 0 ... 16 are scaled to 0 ... 255.
    """
    source = {"test_fraction": TEST_FRACTION, "seed": _SPLIT_KEY.seed}
    return cached_dataset("digits", source, _build)


def digit_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all digits, shape (1797, 8, 8, 1), and their labels, shape (1797,)."""
    # Only here: importing scikit-learn takes longer than reading the cache.
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = np.rint(bunch.images * (255 / _LARGEST_VALUE)).astype(np.uint8)
    return images[..., None], bunch.target.astype(np.int64)


def _build(writer: EntryWriter) -> Contents:
    images, labels = digit_images()
    is_test = _test_mask(labels)
    writer.put_images("train", images[~is_test])
    writer.put_labels("train", labels[~is_test])
    writer.put_images("test", images[is_test])
    writer.put_labels("test", labels[is_test])
    return Contents(CLASS_NAMES)


def _test_mask(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark `TEST_FRACTION` of each class, rounded."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        shuffled = (
            _SPLIT_KEY.child(label).numpy().permutation(np.flatnonzero(labels == label))
        )
        mask[shuffled[: round(TEST_FRACTION * len(shuffled))]] = True
    return mask
