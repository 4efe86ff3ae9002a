from pathlib import Path

import pytest

from knnper.data.dividing import Split
from knnper.data.split_names import is_split_name, split_folders, split_of
from knnper.errors import DataError

ROOT, ADVICE = Path("root"), "or say otherwise"


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", "train Training TRAIN train_set trainset TrainSet train-data"),
        ("validation", "val valid Validation VAL dev dev_set valset"),
        ("test", "test Testing TEST test_set Testset test.images"),
        (None, "cat eval trained contest train1 seg_train set data alice Development"),
    ],
)
def test_names_of_splits(split: Split | None, names: str) -> None:
    assert {split_of(name) for name in names.split()} == {split}


def test_eval_is_a_split_of_which_nobody_knows_the_kind() -> None:
    assert is_split_name("Eval")
    assert is_split_name("Training")
    assert not is_split_name("photo")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("Testing Training", {"train": "Training", "test": "Testing"}),
        ("TRAIN Test Valid", {"train": "TRAIN", "validation": "Valid", "test": "Test"}),
        ("Train dev", {"train": "Train", "validation": "dev"}),
        # As written here, one alone is enough.
        ("bus train", {"train": "train"}),
        ("control test", {"test": "test"}),
        # Classes or clients.
        ("Training Match", {}),
        ("dev alice", {}),
        ("Test control", {}),
        ("cat dog", {}),
    ],
)
def test_folders_of_splits(names: str, expected: dict[Split, str]) -> None:
    assert split_folders(ROOT, names.split(), ADVICE) == expected


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("seg_train seg_test", "'seg_train' and 'seg_test'"),
        ("train2017 val2017", "'train2017' and 'val2017'"),
        ("Train Eval", "'Train' and 'Eval'"),
        ("train Train test", "the folders train, Train, expected one"),
    ],
)
def test_unclear_splits_are_refused(names: str, found: str) -> None:
    with pytest.raises(DataError, match=f"root: found {found}.*, {ADVICE}"):
        split_folders(ROOT, names.split(), ADVICE)
