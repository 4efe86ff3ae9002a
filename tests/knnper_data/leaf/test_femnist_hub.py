import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper.data.leaf import FemnistHubSettings
from knnper.errors import DataError

WRITERS = ["f1", "f0", "f1", "f0", "f1", "f1"]
GREYS = [10, 20, 30, 40, 50, 60]


class Rows:
    """Stands in for the table that the Hub's package gives."""

    def __init__(self) -> None:
        pictures = [Image.new("RGB", (28, 28), (grey,) * 3) for grey in GREYS]
        self._columns: dict[str, list[Any]] = {
            "image": pictures,
            "writer_id": WRITERS,
            "character": [0, 61, 2, 3, 4, 5],
        }

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: [row[at] for at in key] for name, row in self._columns.items()}


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def federated(**arguments: Any) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(load_split=load_split)

    def load_split(split: str) -> Rows:
        asked.append(split)
        return Rows()

    package = SimpleNamespace(FederatedDataset=federated)
    monkeypatch.setitem(sys.modules, "flwr_datasets", package)
    return asked


def test_each_writers_images_are_divided(tmp_path: Path, asked_for: list[Any]) -> None:
    settings = FemnistHubSettings(
        root=str(tmp_path), split="time", test_fraction=0.5, min_samples=2
    )
    found = settings.load()
    arguments, split = asked_for
    assert arguments["dataset"] == "flwrlabs/femnist"
    assert arguments["shuffle"] is False
    assert arguments["cache_dir"] == str(tmp_path)
    assert split == "train"
    assert found.train.images.shape == (3, 28, 28, 1)
    assert found.train.images[:, 3, 3, 0].tolist() == [20, 10, 30]
    assert found.test.images[:, 3, 3, 0].tolist() == [40, 50, 60]
    np.testing.assert_array_equal(found.train.labels, [61, 0, 2])
    np.testing.assert_array_equal(found.train.client_ids, [0, 1, 1])
    assert found.class_names[61] == "z"


def test_it_is_downloaded_once(tmp_path: Path, asked_for: list[Any]) -> None:
    FemnistHubSettings().load()
    FemnistHubSettings(root=str(tmp_path)).load()
    assert len(asked_for) == 2  # one package's arguments and one split


def test_without_the_package_or_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**arguments: Any) -> None:
        raise ConnectionError("no route to the Hub")

    package = SimpleNamespace(FederatedDataset=unreachable)
    monkeypatch.setitem(sys.modules, "flwr_datasets", package)
    with pytest.raises(DataError, match=r"femnist cannot be loaded .* no route"):
        FemnistHubSettings().load()
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(DataError, match=r"femnist_hub needs .*knnper\[hub\]"):
        FemnistHubSettings().load()
