import numpy as np

from knnper.data.digits import DigitsSettings, load_digits


def test_shapes_and_split() -> None:
    digits = load_digits(DigitsSettings())
    assert digits.spec.image_shape == (8, 8, 1)
    assert digits.spec.num_classes == 10
    assert digits.class_names == tuple("0123456789")
    assert len(digits.train) + len(digits.test) == 1797
    assert digits.train.images.max() == 255
    assert digits.train.images.min() == 0
    train = np.bincount(digits.train.labels)
    test = np.bincount(digits.test.labels)
    assert np.abs(test / (train + test) - 0.25).max() < 0.005


def test_the_splits_are_scikit_learns_images() -> None:
    from sklearn import datasets

    digits = load_digits(DigitsSettings())
    both = np.concatenate([digits.train.images, digits.test.images])[..., 0]
    found = sorted(image.tobytes() for image in both)
    expected = np.rint(datasets.load_digits().images / 16 * 255).astype(np.uint8)
    assert found == sorted(image.tobytes() for image in expected)
