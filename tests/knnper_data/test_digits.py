from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from knnper.data.digits import (
    DOMAINS,
    DigitDomainsSettings,
    DigitsSettings,
    digit_images,
    draw_domains,
)
from knnper.data.examples import Dataset, LabelledArrays
from knnper.seeding import RandomKey


def test_shapes_and_split_of_scikit_learns_images() -> None:
    from sklearn import datasets

    digits = DigitsSettings().load()
    assert digits.spec.image_shape == (8, 8, 1)
    assert digits.spec.num_classes == 10
    assert digits.class_names == tuple("0123456789")
    train, test = np.bincount(digits.train.labels), np.bincount(digits.test.labels)
    assert np.abs(test / (train + test) - 0.25).max() < 0.005
    both = np.concatenate([digits.train.images, digits.test.images])[..., 0]
    found = sorted(image.tobytes() for image in both)
    expected = np.rint(datasets.load_digits().images / 16 * 255).astype(np.uint8)
    assert found == sorted(image.tobytes() for image in expected)


NAMES = ["plain", "inverted", "rotated", "blurred"]
CORNER = [[0, 30, 60], [90, 120, 150], [180, 210, 240]]
MADE = {
    "plain": CORNER,
    "inverted": [[255, 225, 195], [165, 135, 105], [75, 45, 15]],
    "rotated": [[60, 150, 240], [30, 120, 210], [0, 90, 180]],
    # The first one: (4 · 0 + 2 · 30 + 2 · 90 + 120) / 9.
    "blurred": [[40, 60, 80], [100, 120, 140], [160, 180, 200]],
}


def domain_ids(arrays: LabelledArrays) -> NDArray[np.int64]:
    assert arrays.domain_ids is not None
    return arrays.domain_ids


def counted(arrays: LabelledArrays) -> Counter[tuple[int, int]]:
    """Return how many images there are by domain and label."""
    pairs = zip(domain_ids(arrays).tolist(), arrays.labels.tolist(), strict=True)
    return Counter(pairs)


def images_of(dataset: Dataset, domain: int) -> list[bytes]:
    """Return the images of a domain, of both splits, sorted."""
    found = [
        image.tobytes()
        for part in (dataset.train, dataset.test)
        for image in part.images[domain_ids(part) == domain]
    ]
    return sorted(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_domain_by_hand(name: str) -> None:
    image = np.array(CORNER, dtype=np.uint8)[None, ..., None]
    assert DOMAINS[name](image)[0, ..., 0].tolist() == MADE[name]


def test_every_class_of_every_domain_is_tested_alike() -> None:
    found = DigitDomainsSettings().load()
    assert list(found.domain_names) == NAMES
    assert found.class_names == tuple("0123456789")
    assert found.spec.image_shape == (8, 8, 1)
    # 0.15 of some 449 images, shared out among ten classes.
    assert set(counted(found.test).values()) == {7}
    everything = counted(found.train) + counted(found.test)
    labels = Counter(digit_images()[1].tolist())
    for (_, label), size in everything.items():
        assert abs(size - labels[label] / 4) < 1
    sizes = Counter(domain for domain, _ in everything.elements())
    assert sorted(sizes.values()) == [449, 449, 449, 450]


def test_each_digit_is_in_one_domain() -> None:
    found = DigitDomainsSettings(seed=5).load()
    images, labels = digit_images()
    key = RandomKey(5, ("digit_domains", "domain"))
    domain_of = draw_domains(labels, key)
    assert len(DOMAINS) == 4
    for domain, make in enumerate(DOMAINS.values()):
        expected = make(images[domain_of == domain])
        assert images_of(found, domain) == sorted(one.tobytes() for one in expected)


@pytest.mark.parametrize(
    ("settings", "same_domains"), [({"seed": 1}, False), ({"test_fraction": 0.4}, True)]
)
def test_what_the_settings_change(settings: dict[str, Any], same_domains: bool) -> None:
    first = DigitDomainsSettings().load()
    other = DigitDomainsSettings(**settings).load()
    assert (images_of(first, 0) == images_of(other, 0)) is same_domains
    assert not np.array_equal(first.test.images, other.test.images)
    again = DigitDomainsSettings().load()  # from the cache
    assert again.domain_names == first.domain_names
    assert np.array_equal(again.train.images, first.train.images)
    assert np.array_equal(domain_ids(again.test), domain_ids(first.test))
