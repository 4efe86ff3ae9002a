"""What docs/adding_a_dataset.md tells the reader to write does what it says."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from knnper.data.examples import DataFormat
from knnper.errors import DataError

PAGE = "docs/adding_a_dataset.md"
MODULE = "knnper.data.npz_file"


@pytest.fixture
def names(
    listings: Callable[[str, str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Return what the listing defines, as the module it belongs to."""
    monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "cache"))
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    (listing,) = listings(PAGE, "python")
    exec(compile(listing, MODULE, "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture
def kind(names: dict[str, Any]) -> Any:
    assert issubclass(names["NpzSettings"], DataFormat)
    return names["NpzSettings"]


def test_the_documented_loader_reads_arrays(kind: Any, tmp_path: Path) -> None:
    def arrays(labels: list[int]) -> dict[str, Any]:
        images = np.arange(4 * len(labels), dtype=np.uint8).reshape(-1, 2, 2, 1)
        return {"images": images, "labels": np.array(labels)}

    train, test = arrays([0, 2, 1]), arrays([2])
    path = tmp_path / "arrays.npz"
    splits = {"train": train, "test": test}
    named = {f"{s}_{k}": v for s, split in splits.items() for k, v in split.items()}
    np.savez(path, **named)
    found = kind(path=str(path)).load()
    assert found.spec.image_shape == (2, 2, 1)
    assert found.class_names == ("0", "1", "2")
    assert np.array_equal(found.train.images, train["images"])
    assert found.test.labels.tolist() == [2]


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_the_documented_loader_names_the_file(
    kind: Any, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "arrays.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"arrays\.npz cannot be read"):
        kind(path=str(path)).load()
