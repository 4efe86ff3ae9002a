from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.examples import Examples
from knnper.data.site_check import check_site, find_copies
from knnper.data.site_data import NamedExamples, SiteData
from tests.knnper_data.site.site_cases import IMAGES, pixels, put_image, surveyed

Rows = list[tuple[str, int, int]]
"""Name, label, and the seed of the image: equal seeds are equal images."""


def part(rows: Rows) -> NamedExamples:
    images = [torch.from_numpy(pixels(1, seed)) for _, _, seed in rows]
    empty = torch.empty((0, 4, 4, 3), dtype=torch.uint8)
    labels = torch.tensor([label for _, label, _ in rows], dtype=torch.int64)
    examples = Examples(torch.cat([empty, *images]), labels)
    return NamedExamples(examples, tuple(name for name, _, _ in rows))


def site(train: Rows, validation: Rows, test: Rows, **more: Any) -> SiteData:
    return SiteData(part(train), part(validation), part(test), IMAGES, **more)


def test_copies_are_named_by_pairs_of_splits() -> None:
    data = site(
        [("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("d", 1, 2)],
        [("e", 0, 1)],
        [("f", 0, 1), ("g", 0, 1), ("h", 2, 9)],
    )
    copies, conflicts = find_copies(data)
    found = {(one.original, one.copy): (one.num_copies, one.shown) for one in copies}
    assert found == {
        ("train", "train"): (2, (("a", "b"), ("a", "c"))),
        ("train", "validation"): (1, (("a", "e"),)),
        ("train", "test"): (2, (("a", "f"), ("a", "g"))),
        ("validation", "test"): (2, (("e", "f"), ("e", "g"))),
        ("test", "test"): (1, (("f", "g"),)),
    }
    assert conflicts.num_inputs == 0


def test_at_most_ten_are_shown() -> None:
    data = site([(str(n), n % 2, n // 2) for n in range(30)], [], [])
    copies, conflicts = find_copies(data)
    assert copies[0].num_copies == conflicts.num_inputs == 15
    assert len(conflicts.shown) == 10
    assert conflicts.shown[0] == ("0 (cat)", "1 (dog)")


TRAIN: Rows = [("a", 0, 1), ("b", 1, 2)]
VALIDATION: Rows = [("v", 0, 3)]
TEST: Rows = [("t", 0, 4)]


def test_problems(tmp_path: Path) -> None:
    (problem,) = check_site(site(TRAIN, VALIDATION, [("t", 0, 1)])).problems
    assert problem.startswith("train and test overlap: 1 test examples are copies")
    found = check_site(site([], VALIDATION, TEST))
    assert found.problems[0].startswith("there are no training examples")
    assert found.splits["train"].mean is None
    put_image(tmp_path / "cat" / "a.png", 1)
    (tmp_path / "cat" / "b.png").write_bytes(b"")
    found = check_site(surveyed("image_folder", tmp_path, IMAGES, path="."))
    assert list(found.unreadable) == ["cat/b.png"]
    assert found.problems[0].startswith("1 examples cannot be read")


@pytest.mark.parametrize(
    ("parts", "warning"),
    [
        ((TRAIN, [], TEST), "there are no validation examples"),
        ((TRAIN, VALIDATION, []), "there are no test examples"),
        ((TRAIN[:1], VALIDATION, TEST), "all training examples have the same label"),
        ((TRAIN, [("v", 0, 1)], TEST), "copies of examples of train: the weight of"),
        ((TRAIN, VALIDATION, [("t", 0, 3)]), "measured accuracies may be too high"),
        (([*TRAIN, ("c", 1, 2)], VALIDATION, TEST), "1 examples of train are copies"),
        (([*TRAIN, ("c", 2, 2)], VALIDATION, TEST), "1 inputs occur with more than"),
    ],
)
def test_what_may_not_be_meant(parts: tuple[Rows, Rows, Rows], warning: str) -> None:
    found = check_site(site(*parts))
    assert found.problems == ()
    assert any(warning in one for one in found.warnings)


def test_dropped_labels_are_a_warning() -> None:
    data = site(TRAIN, VALIDATION, TEST, dropped={"gnu": 2, "elk": 1})
    (warning,) = check_site(data).warnings
    assert warning.startswith("3 examples are left out")
    assert warning.endswith("labels gnu, elk")


@pytest.mark.parametrize(
    ("value", "warning"),
    [(0, "all values of all training inputs are 0"), (1, "no pixel of a training")],
)
def test_odd_values(tmp_path: Path, value: int, warning: str) -> None:
    inputs = np.zeros((40, 4, 4, 3), np.uint8)
    inputs[:, 0] = value
    np.savez(tmp_path / "a.npz", inputs=inputs, labels=np.arange(40) % 3)
    found = check_site(surveyed("npz", tmp_path, IMAGES, path="a.npz"))
    assert any(one.startswith(warning) for one in found.warnings)
