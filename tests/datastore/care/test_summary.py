"""A store in figures."""

from pathlib import Path

import pytest
import torch

from knnper.datastore.examples import StoreError, StoreSpec
from knnper.datastore.index import GraphSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import create_store, open_store
from knnper.datastore.transfer import num_to_embed, summarize
from tests.datastore.care.store_cases import DIM, small_store, some


def test_the_figures_of_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(capacity=50, index=GraphSettings())
    with small_store(folder, chosen, count=31) as store:
        assert summarize(folder).writer is not None
        store.save()
        store.reembed(lambda inputs: inputs.flatten(1).float(), "second")
    summary = summarize(folder)
    assert summary.num_by_label == (11, 10, 10)
    assert (summary.num_examples, summary.capacity) == (31, 50)
    assert [one.fingerprint for one in summary.versions] == ["first", "second"]
    assert (summary.active, summary.previous) == (2, 1)
    assert summary.arrivals == (1000.0, 1030.0)
    assert summary.writer is None
    assert summary.index_bytes > 31 * 48 * 4
    assert summary.files["store.sqlite3"] > 31 * 48 * 5


def test_the_figures_of_an_empty_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    create_store(folder, StoreSpec(2), DIM, "first").close()
    summary = summarize(folder)
    assert summary.num_by_label == (0, 0)
    assert summary.arrivals is None
    assert summary.capacity is None
    with pytest.raises(StoreError, match="holds no store"):
        summarize(tmp_path)


def test_what_is_left_to_embed(tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def fails_at_the_second(inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) < 256:
            raise KeyboardInterrupt
        return inputs.flatten(1).float()

    with small_store(folder, count=300) as store:
        assert num_to_embed(folder, "first") == 0
        assert num_to_embed(folder, "second") == 300
        with pytest.raises(KeyboardInterrupt):
            store.reembed(fails_at_the_second, "second")
        assert num_to_embed(folder, "second") == 44
    counts = list[int]()
    with open_store(folder, writable=True) as store:
        store.add(some(5, 7, "more"))
        store.reembed(lambda inputs: inputs.flatten(1).float(), "second", counts.append)
    assert sum(counts) == 49
