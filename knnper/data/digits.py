"""The digits of scikit-learn, unchanged and in four domains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import CentralSplit, DatasetContents, EntryWriter, cached_dataset
from knnper.data.dividing import mark_balanced
from knnper.data.examples import DataFormat, Dataset
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeInt

Images = NDArray[np.uint8]
Integers = NDArray[np.int64]
TEST_FRACTION = 0.25  # of each class; scikit-learn ships no official split
_SPLIT_KEY = RandomKey(0, ("digits", "test"))
_LARGEST_VALUE = 16
CLASS_NAMES = tuple(str(digit) for digit in range(10))


@dataclass(frozen=True)
class DigitsSettings(DataFormat):
    """The digits; there are no settings."""

    name = "digits"
    title = "Digits"
    summary = "1,797 handwritten digits of 8x8 pixels; comes with scikit-learn"

    def load(self) -> Dataset:
        """Load the digits, images of shape (8, 8, 1) in ten classes.

        The split is the same in every experiment: `TEST_FRACTION` of each class are
        test data. Values from 0 to 16 are scaled to 0 to 255.
        """

        def build(writer: EntryWriter) -> DatasetContents:
            images, labels = digit_images()
            is_test = np.zeros(len(labels), dtype=bool)
            for label in range(10):
                places = np.flatnonzero(labels == label)
                shuffled = _SPLIT_KEY.child(label).numpy().permutation(places)
                is_test[shuffled[: round(TEST_FRACTION * len(shuffled))]] = True
            for split, chosen in _by_split(is_test):
                writer.put_images(split, images[chosen])
                writer.put_labels(split, labels[chosen])
            return DatasetContents(CLASS_NAMES)

        source = {"test_fraction": TEST_FRACTION, "seed": _SPLIT_KEY.seed}
        return cached_dataset("digits", source, build)


def digit_images() -> tuple[Images, Integers]:
    """Return all digits, shape (1797, 8, 8, 1), and their labels, shape (1797,)."""
    # Imported late: importing scikit-learn takes longer than reading the cache.
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = np.rint(bunch.images * (255 / _LARGEST_VALUE)).astype(np.uint8)
    return images[..., None], bunch.target.astype(np.int64)


def _by_split(
    is_test: NDArray[np.bool_],
) -> tuple[tuple[CentralSplit, NDArray[np.bool_]], ...]:
    return ("train", ~is_test), ("test", is_test)


@dataclass(frozen=True)
class DigitDomainsSettings(DataFormat):
    """Settings of the digits in domains: the test images and the assignment.

    Attributes
    ----------
    test_fraction
        Approximate fraction of test images in each domain, (0, 1): the same number of
        every class, but at most half of a class. 0.15 in Chen et al. 2023, section 5.
    seed
        Seed of the assignment to domains and of the test images.
    """

    name = "digit_domains"
    title = "Digits in domains"
    summary = "the 1,797 digits, each plain, inverted, rotated or blurred"

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Load the 1,797 digits, images of shape (8, 8, 1), each in one of `DOMAINS`.

        Every class is distributed evenly over the domains. Each domain has a test split
        with the same number of images of each class.
        """

        def build(writer: EntryWriter) -> DatasetContents:
            images, labels = digit_images()
            key = RandomKey(self.seed, ("digit_domains",))
            domain_of = draw_domains(labels, key.child("domain"))
            changed = images.copy()
            is_test = np.zeros(len(labels), dtype=bool)
            for domain, (name, make) in enumerate(DOMAINS.items()):
                places = np.flatnonzero(domain_of == domain)
                changed[places] = make(images[places])
                kinds = [CLASS_NAMES[label] for label in labels[places]]
                part_key = key.child("test").child(name)
                is_test[places] = mark_balanced(kinds, self.test_fraction, part_key)
            for split, chosen in _by_split(is_test):
                writer.put_images(split, changed[chosen])
                writer.put_labels(split, labels[chosen])
                writer.put_domain_ids(split, domain_of[chosen])
            return DatasetContents(CLASS_NAMES, domain_names=tuple(DOMAINS))

        source = {"test_fraction": self.test_fraction, "seed": self.seed}
        return cached_dataset("digit_domains", source, build)


def _blur(images: Images) -> Images:
    """Replace every pixel by the mean of the nine around it; edges are repeated."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    blurred: Images = np.rint(windows.mean(axis=(-2, -1))).astype(np.uint8)
    return blurred


DOMAINS: Mapping[str, Callable[[Images], Images]] = {
    "plain": lambda images: images,
    "inverted": lambda images: 255 - images,
    # By 90 degrees, counter-clockwise.
    "rotated": lambda images: np.rot90(images, axes=(1, 2)),
    "blurred": _blur,
}
"""Transformation of each domain, for images uint8 of shape (n, height, width, 1)."""


def draw_domains(labels: Integers, key: RandomKey) -> Integers:
    """Distribute every class evenly over `DOMAINS`; return positions in these."""
    shuffled = [
        key.child(label).numpy().permutation(np.flatnonzero(labels == label))
        for label in np.unique(labels).tolist()
    ]
    domain_of = np.empty(len(labels), dtype=np.int64)
    domain_of[np.concatenate(shuffled)] = np.arange(len(labels)) % len(DOMAINS)
    return domain_of
