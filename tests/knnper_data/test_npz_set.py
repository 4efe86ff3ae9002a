from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.arrays import NpzFileSettings
from knnper.data.examples import Dataset
from knnper.errors import DataError

IMAGES = np.arange(20, dtype=np.uint8).repeat(12).reshape(20, 2, 2, 3)
LABELS = np.arange(20) % 2
UNKNOWN = {"x_test": IMAGES, "y_test": LABELS + 1}


def loaded(folder: Path, settings: Mapping[str, Any] = {}, **arrays: Any) -> Dataset:
    np.savez(folder / "own.npz", **arrays)
    return NpzFileSettings(path=str(folder / "own.npz"), **settings).load()


@pytest.mark.parametrize("name", ["x_{}", "X_{}", "{}_inputs"])
def test_given_splits(tmp_path: Path, name: str) -> None:
    data = loaded(
        tmp_path,
        {},
        **{name.format("train"): IMAGES[:12], name.format("test"): IMAGES[12:]},
        # As Keras has CIFAR's labels; positions in class_names.
        **{name.replace("x", "y").replace("X", "y").replace("inputs", "labels")
           .format(split): LABELS[part, None]
           for split, part in (("train", slice(12)), ("test", slice(12, 20)))},
        class_names=["odd", "even"],
    )  # fmt: skip
    assert (data.class_names, data.spec.image_shape) == (("odd", "even"), (2, 2, 3))
    assert data.spec.mean == pytest.approx([np.arange(12).mean() / 255] * 3)
    np.testing.assert_array_equal(data.train.images, IMAGES[:12])
    np.testing.assert_array_equal(data.test.labels, LABELS[12:])
    assert data.train.client_ids is None


@pytest.mark.parametrize("validation", ["x_val", "X_valid", "dev_x", "val_inputs"])
def test_validation_data_is_joined_to_the_training_data(
    tmp_path: Path, validation: str
) -> None:
    labels = validation.replace("inputs", "labels").replace("x", "y").replace("X", "Y")
    splits: dict[str, Any] = {
        **{"x_train": IMAGES[:8], "y_train": LABELS[:8]},
        **{validation: IMAGES[8:12], labels: LABELS[8:12]},
        **{"x_testing": IMAGES[12:], "Y_test": LABELS[12:]},
    }
    data = loaded(tmp_path, {}, **splits)
    np.testing.assert_array_equal(data.train.images, IMAGES[:12])
    np.testing.assert_array_equal(data.test.images, IMAGES[12:])


def test_arrays_of_unclear_splits_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits: dict[str, Any] = {
        f"{name}_{split}": part
        for split in ("train", "test", "eval")
        for name, part in (("x", IMAGES), ("y", LABELS))
    }
    loaded(tmp_path, {}, **splits, x_mean=np.zeros(3))
    assert "the arrays x_eval, y_eval are not read" in caplog.text


def test_a_part_of_each_class_or_client_is_tested_on(tmp_path: Path) -> None:
    data = loaded(tmp_path, x=IMAGES, y=np.array(["b", "a"])[LABELS])
    assert data.class_names == ("a", "b")
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    found = np.concatenate([data.train.images, data.test.images])[:, 0, 0, 0]
    assert sorted(found.tolist()) == list(range(20))
    for part in (data.train, data.test):
        np.testing.assert_array_equal(1 - part.images[:, 0, 0, 0] % 2, part.labels)
    owners = np.array([10] * 15 + [9] * 5)
    data = loaded(tmp_path, {"test_fraction": 0.4}, x=IMAGES, y=LABELS, clients=owners)
    assert data.client_names == ("9", "10")
    assert data.test.client_ids is not None
    assert np.bincount(data.test.client_ids).tolist() == [2, 6]
    np.testing.assert_array_equal(
        data.test.images[:, 0, 0, 0] < 15, data.test.client_ids == 1
    )


def test_features_are_standardised_by_training_rows(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(3e4, 2, (5000, 3))
    rows[:, 2] = 7
    labels = np.arange(5000) % 3
    data = loaded(
        tmp_path,
        x_train=rows[:4000], y_train=labels[:4000],
        x_validation=rows[4000:4900], y_validation=labels[4000:4900],
        x_test=rows[4900:], y_test=labels[4900:],
    )  # fmt: skip
    assert (len(data.train), len(data.test)) == (4900, 100)
    assert (data.spec.dtype, data.spec.image_shape) == ("float32", (1, 1, 3))
    kept = rows[:4900].astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(data.spec.mean, kept.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(data.spec.std[:2], kept.std(axis=0)[:2], rtol=1e-9)
    assert data.spec.std[2] == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, "found no array labels; expected inputs and labels"),
        ({"x": IMAGES, "y": LABELS[:3]}, r"shape \(20, 2, 2, 3\) and labels of"),
        ({"x": IMAGES, "y": LABELS, "inputs": IMAGES}, "arrays x and inputs"),
        ({"x": IMAGES, "y": LABELS / 2}, "labels of float64, expected whole numbers"),
        ({"x": IMAGES, "y": LABELS, "clients": [1]}, r"clients: .*\(20,\), found"),
        (
            {"x_train": IMAGES, "y_train": LABELS, "clients": LABELS},
            "no array train_clients",
        ),
        (
            {"x_train": IMAGES, "y_train": LABELS} | UNKNOWN,
            "classes that no training example has: 2",
        ),
        ({"x": np.moveaxis(IMAGES.repeat(4, 1).repeat(4, 2), 3, 1), "y": LABELS},
         r"\(20, 3, 8, 8\), which seem to have the channels first"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "found no training data"),
        ({"x": IMAGES * np.nan, "y": LABELS}, "values in the inputs are missing"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, **arrays)
