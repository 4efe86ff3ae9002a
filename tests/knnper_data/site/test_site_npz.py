"""Own data as arrays in a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.examples import InputSpec
from knnper.data.site_data import SiteTask
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import (
    FEATURES,
    IMAGES,
    NAMES,
    classes,
    opened,
    pixels,
    split_of,
    surveyed,
)


def save(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "a.npz", **arrays)


def test_one_pair_of_arrays(tmp_path: Path) -> None:
    inputs = pixels(30)
    save(tmp_path, inputs=inputs, labels=np.arange(30) % 3)
    data = opened("npz", tmp_path, IMAGES, path="a.npz")

    assert sum(len(part) for _, part in data.splits()) == 30
    assert classes(data) == {f"{n:05d}": NAMES[n % 3] for n in range(30)}
    for _, part in data.splits():
        positions = [int(name) for name in part.names]
        assert positions == sorted(positions)
        np.testing.assert_array_equal(part.examples.images.numpy(), inputs[positions])
    assert data.train.examples.images.dtype == torch.uint8
    assert data.train.examples.labels.dtype == torch.int64


def test_class_names_in_the_file_decide(tmp_path: Path) -> None:
    save(
        tmp_path,
        inputs=pixels(3),
        labels=np.array([0, 1, 1], np.uint8),
        class_names=np.array(["fox", "cat"]),
        names=np.array(["x", "y", "z"]),
        split=np.array(["train", "test", "validation"]),
    )
    data = opened("npz", tmp_path, IMAGES, path="a.npz")
    assert classes(data) == {"x": "fox", "y": "cat", "z": "cat"}
    assert split_of(data) == {"x": "train", "y": "test", "z": "validation"}


def test_a_pair_of_arrays_for_each_split(tmp_path: Path) -> None:
    save(
        tmp_path,
        train_inputs=pixels(2),
        train_labels=np.array(["dog", "fox"]),
        validation_inputs=pixels(1, 1),
        validation_labels=np.array(["cat"]),
        test_inputs=pixels(0),
        test_labels=np.array([], dtype=np.str_),
    )
    data = opened("npz", tmp_path, IMAGES, path="a.npz")
    assert data.train.names == ("train/00000", "train/00001")
    assert data.validation.names == ("validation/00000",)
    assert len(data.test) == 0
    assert data.test.examples.images.shape == (0, 4, 4, 3)
    assert data.train.examples.labels.tolist() == [1, 2]
    np.testing.assert_array_equal(data.validation.examples.images, pixels(1, 1))
    assert data.client_data().validation is data.validation.examples


def test_validation_data_is_taken_from_training_data_test_data_is_not(
    tmp_path: Path,
) -> None:
    labels = np.zeros(200, int)
    save(tmp_path, train_inputs=pixels(200), train_labels=labels)
    data = opened("npz", tmp_path, IMAGES, path="a.npz")
    assert 20 < len(data.validation) < 60
    assert len(data.test) == 0


def test_features(tmp_path: Path) -> None:
    rows = np.array([[1.5, -2.0], [0.1, 3.0]])
    save(tmp_path, train_inputs=rows, train_labels=np.array([0, 2]))
    none = {"validation": 0.0}
    data = opened("npz", tmp_path, FEATURES, path="a.npz", fractions=none)
    expected = torch.tensor([[[[1.5, -2.0]]], [[[0.1, 3.0]]]])
    assert torch.equal(data.train.examples.images, expected)
    for part in (data.train, data.validation):
        assert part.examples.images.dtype == torch.float32


def test_grey_images_need_no_channel(tmp_path: Path) -> None:
    task = SiteTask(InputSpec((2, 3, 1), 3, (0.5,), (0.5,)), NAMES)
    save(tmp_path, inputs=np.full((5, 2, 3), 7, np.int16), labels=np.zeros(5, int))
    images = opened("npz", tmp_path, task, path="a.npz").train.examples.images
    assert (images.shape[1:], images.dtype) == ((2, 3, 1), torch.uint8)


def test_without_a_task_the_data_speaks_for_itself(tmp_path: Path) -> None:
    save(tmp_path, inputs=pixels(2), labels=np.array([10, 9]))
    task = surveyed("npz", tmp_path, path="a.npz").task
    assert task.class_names == ("9", "10")
    assert task.spec == InputSpec((4, 4, 3), 2, (0.0,) * 3, (1.0,) * 3)
    save(tmp_path, inputs=np.ones((2, 5)), labels=np.array(["b", "a"]))
    task = surveyed("npz", tmp_path, path="a.npz").task
    assert task.class_names == ("a", "b")
    assert (task.spec.image_shape, task.spec.dtype) == ((1, 1, 5), "float32")


GOOD: dict[str, Any] = {"inputs": pixels(3), "labels": np.array([0, 1, 2])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "found no array inputs"),
        ({"labels": np.zeros(2, int)}, r"labels of shape \(2,\); expected"),
        ({"labels": np.zeros(3)}, "found labels of float64, expected whole numbers"),
        ({"labels": np.array([0, 1, 3])}, "'3': 1 example\n"),
        ({"class_names": np.array(["cat", "dog"])}, "positions in its class_names"),
        ({"inputs": pixels(3)[:, :2]}, r"found inputs uint8 of shape \(3, 2, 4, 3\)"),
        ({"inputs": pixels(3) / 255}, r"found \d+ values in the inputs such as 0\.\d"),
        ({"inputs": pixels(3).astype(int) + 9}, "such as 2.., expected whole numbers"),
        ({"names": np.array(["a", "b", "a"])}, "1 names of examples occur more than"),
        ({"names": np.array(["a", "b", ""])}, "or cannot be written as UTF-8"),
        ({"names": np.array(["a"])}, r"names: expected texts of shape \(3,\)"),
        ({"split": np.array(["train", "val", "val"])}, "the split 'val' in 2 examples"),
        ({"train_inputs": pixels(3)}, "expected inputs and labels, or train_inputs"),
        ({"labels": np.array([0, None, 1], object)}, "cannot be read as .npz"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arrays = {key: one for key, one in (GOOD | changes).items() if one is not None}
    save(tmp_path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        opened("npz", tmp_path, IMAGES, path="a.npz")
    assert str(tmp_path / "a.npz") in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "task", "more", "message"),
    [
        (
            [[1.0, np.nan], [1e300, 2.0]],
            FEATURES,
            {},
            "2 values in .* missing, inf",
        ),
        (
            pixels(2),
            IMAGES,
            {"test_inputs": pixels(1) / 1, "test_labels": np.array([0])},
            "the inputs of the splits differ in form",
        ),
        (pixels(0), IMAGES, {}, "holds no examples"),
    ],
)
def test_splits_that_do_not_fit(
    tmp_path: Path, inputs: Any, task: SiteTask, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        opened("npz", tmp_path, task, path="a.npz")
    labels = np.zeros(len(inputs), int)
    save(tmp_path, train_inputs=np.array(inputs), train_labels=labels, **more)
    none = {"validation": 0.0}
    with pytest.raises(DataError, match=message):
        opened("npz", tmp_path, task, path="a.npz", fractions=none)
