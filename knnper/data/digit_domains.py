"""Scikit-learn's digits in four domains: small images for clients of domains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.config.ranges import NonNegativeInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.digits import CLASS_NAMES, digit_images
from knnper.data.domain_folder import balanced_part

Images = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class DigitDomainsSettings(Settings):
    """How many are test images, and which ones are in which domain.

    Attributes
    ----------
    test_fraction
        Part of each domain that is tested on, (0, 1), about: the same number of images
        of every class, but at most half of those that a class has. 0.15 in
        fedbasis-pflbed.txt, section 5.
    seed
        Of the domains and of the test images.
    """

    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: NonNegativeInt = 0


def load_digit_domains(settings: DigitDomainsSettings) -> Dataset:
    """Return the 1,797 digits, images of shape (8, 8, 1), each in one of `DOMAINS`.

    Every class is shared out evenly among the domains. In each of them a test split
    is set apart in which all classes count the same.
    """
    source = {"test_fraction": settings.test_fraction, "seed": settings.seed}
    return cached_dataset(
        "digit_domains", source, lambda writer: _build(writer, settings)
    )


def _as_they_are(images: Images) -> Images:
    return images


def _inverted(images: Images) -> Images:
    return 255 - images


def _rotated(images: Images) -> Images:
    """Turn by 90 degrees, against the clock."""
    return np.rot90(images, axes=(1, 2))


def _blurred(images: Images) -> Images:
    """Replace every pixel by the mean of the nine around it; edges are repeated."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    blurred: Images = np.rint(windows.mean(axis=(-2, -1))).astype(np.uint8)
    return blurred


DOMAINS: Mapping[str, Callable[[Images], Images]] = MappingProxyType(
    {
        "plain": _as_they_are,
        "inverted": _inverted,
        "rotated": _rotated,
        "blurred": _blurred,
    }
)
"""By name what a domain makes of images, uint8 of shape (n, height, width, 1)."""


def domains_of(labels: Integers, key: RandomKey) -> Integers:
    """Share out every class evenly among the domains.

    Parameters
    ----------
    labels
        Shape (n,).
    key
        Fixes who gets which.

    Returns
    -------
    Positions in `DOMAINS`, shape (n,).
    """
    shuffled = [
        key.child(label).numpy().permutation(np.flatnonzero(labels == label))
        for label in np.unique(labels).tolist()
    ]
    domain_of = np.empty(len(labels), dtype=np.int64)
    domain_of[np.concatenate(shuffled)] = np.arange(len(labels)) % len(DOMAINS)
    return domain_of


def _build(writer: EntryWriter, settings: DigitDomainsSettings) -> Contents:
    images, labels = digit_images()
    key = RandomKey(settings.seed, ("digit_domains",))
    domain_of = domains_of(labels, key.child("domain"))
    made = _in_domains(images, domain_of)
    is_test = _test_mask(labels, domain_of, settings.test_fraction, key.child("test"))
    splits: tuple[tuple[Split, NDArray[np.bool_]], ...] = (
        ("train", ~is_test),
        ("test", is_test),
    )
    for split, chosen in splits:
        writer.put_images(split, made[chosen])
        writer.put_labels(split, labels[chosen])
        writer.put_domain_ids(split, domain_of[chosen])
    return Contents(CLASS_NAMES, domain_names=tuple(DOMAINS))


def _in_domains(images: Images, domain_of: Integers) -> Images:
    """Return each image as its domain makes it."""
    made = images.copy()
    for domain, make in enumerate(DOMAINS.values()):
        places = domain_of == domain
        made[places] = make(images[places])
    return made


def _test_mask(
    labels: Integers, domain_of: Integers, fraction: float, key: RandomKey
) -> NDArray[np.bool_]:
    """Mark a part of each domain, of every class the same number."""
    mask = np.zeros(len(labels), dtype=np.bool_)
    for domain, name in enumerate(DOMAINS):
        places = np.flatnonzero(domain_of == domain)
        kinds = [CLASS_NAMES[label] for label in labels[places]]
        mask[places] = balanced_part(kinds, fraction, key.child(name))
    return mask
