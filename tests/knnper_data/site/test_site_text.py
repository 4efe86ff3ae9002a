from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from knnper.data.characters import ALPHABET, CHARACTER_NAMES, NUM_TOKENS, encode
from knnper.data.examples import InputSpec
from knnper.data.site_check import check_site
from knnper.data.site_data import SiteData
from knnper.data.site_inputs import ArrayInputs, fit_inputs
from knnper.data.site_task import SiteTask
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import FEATURES, THREE, opened, surveyed


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 1, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_ids_are_taken_from_any_numbers(shape: tuple[int, ...], dtype: Any) -> None:
    ids = np.array([[0, 1, 2, 0], [2, 2, 1, 0]])
    found = ArrayInputs("own.npz", ids.astype(dtype).reshape(shape)).read([1], THREE)
    assert found.images.tolist() == [[[[2, 2, 1, 0]]]]
    assert str(found.images.dtype) == "torch.uint8"


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_an_id_of_no_character_is_refused(dtype: Any) -> None:
    ids = np.array([[0, 1, 3, 0]], dtype=dtype)
    message = r"such as 3, expected whole numbers from 0 to 2: .* agreed on text"
    with pytest.raises(DataError, match=message):
        fit_inputs(ids, THREE.spec, "own.npz")


TEXT = SiteTask(
    InputSpec((1, 1, 4), NUM_TOKENS, (), (), dtype="token"), CHARACTER_NAMES
)
HALVES = {"validation": 0.25, "test": 0.25}


def of_text(base: Path, text: str, **values: Any) -> SiteData:
    (base / "own.txt").write_text(text, encoding="utf-8")
    return opened("text", base, TEXT, path="own.txt", **{"stride": 1, **values})


def rows(data: SiteData) -> dict[str, list[tuple[str, list[int], int]]]:
    return {
        split: [
            (name, image.flatten().tolist(), label)
            for name, image, label in zip(
                part.names, part.examples.images, part.examples.labels, strict=True
            )
        ]
        for split, part in data.splits()
    }


def test_windows_by_hand(tmp_path: Path) -> None:
    found = rows(of_text(tmp_path, "abcd\u2019fgh", fractions=HALVES))
    ids = encode("abcd'fgh").tolist()
    assert found == {
        "train": [("00000004", ids[:4], ids[4]), ("00000005", ids[1:5], ids[5])],
        "validation": [("00000006", ids[2:6], ids[6])],
        "test": [("00000007", ids[3:7], ids[7])],
    }


def test_a_folder_of_texts_is_split_text_by_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden.txt", "c.md"):
        (tmp_path / name).write_text(f"{name[0]}bcdefghijk")
    data = opened("text", tmp_path, TEXT, path=".", stride=2, fractions=HALVES)
    places = {split: [row[0] for row in found] for split, found in rows(data).items()}
    assert places == {
        "train": [
            "a.txt/00000004",
            "a.txt/00000006",
            "b.txt/00000004",
            "b.txt/00000006",
        ],
        "validation": ["a.txt/00000008", "b.txt/00000008"],
        "test": ["a.txt/00000010", "b.txt/00000010"],
    }


def test_what_is_known_never_becomes_what_is_tested_on(tmp_path: Path) -> None:
    before = of_text(tmp_path, ALPHABET[:40])
    after = of_text(tmp_path, ALPHABET)
    assert before.test.names
    assert set(before.train.names) <= set(after.train.names)
    known = {*before.train.names, *before.validation.names}
    assert known.isdisjoint(after.test.names)


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    length=st.integers(5, 60),
    stride=st.integers(1, 9),
    validation=st.sampled_from([0.0, 0.2, 0.6]),
    test=st.sampled_from([0.0, 0.1, 0.39]),
)
def test_every_example_is_in_one_split_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    stride: int,
    validation: float,
    test: float,
) -> None:
    fractions = {"validation": validation, "test": test}
    base = tmp_path_factory.mktemp("site")
    data = of_text(base, ALPHABET[:length], stride=stride, fractions=fractions)
    found = [int(name) for _, part in data.splits() for name in part.names]
    assert found == list(range(4, length, stride))
    assert len(data.train) >= 1
    assert abs(len(data.test) - test * len(found)) <= 1


def test_without_a_task_windows_are_those_of_plays(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(ALPHABET * 3)
    data = surveyed("text", tmp_path, path="own.txt")
    assert data.task.spec == InputSpec((1, 1, 80), NUM_TOKENS, (), (), dtype="token")
    assert data.train.names[:2] == ("00000080", "00000090")
    assert check_site(data).input_type == "token"


def test_what_is_refused(tmp_path: Path) -> None:
    few = SiteTask(InputSpec((1, 1, 4), 2, (), (), dtype="token"), ("'a'", "'b'"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "short.txt").write_text("abcd")
    for name, task, message in (
        ("short.txt", TEXT, r"no text with more than 4 char.*more text"),
        ("none.txt", TEXT, r"expected a file of plain text, or a folder"),
        ("latin.txt", TEXT, "byte 3 is not UTF-8; convert the file"),
        ("short.txt", FEATURES, r"agreed on rows of features \(float32\)"),
        ("short.txt", few, "federation agreed on other characters; give"),
    ):
        with pytest.raises(DataError, match=message):
            opened("text", tmp_path, task, path=name)
