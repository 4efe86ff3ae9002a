"""Numbers that an index cannot hold, or holds too coarsely: refused, or warned of."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from knnper.datastore.examples import NewExamples
from knnper.datastore.index import HalfSettings
from knnper.datastore.local_memory import LocalMemory
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import configure_store, open_store
from knnper.errors import DataError
from tests.datastore.small_store import examples, new_store

FEATURES = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
LABELS = np.arange(60) % 3


def test_an_index_refuses_numbers_beyond_its_range() -> None:
    large = FEATURES * 1e5
    with pytest.raises(DataError, match="that the index fp16 cannot hold"):
        LocalMemory(store={"index": {"name": "fp16"}}).fit(large, LABELS)
    for name in ("flat", "sq8", "pq", "hnsw", "ivf"):
        memory = LocalMemory(store={"index": {"name": name}}).fit(large, LABELS)
        assert memory.neighbors(large[:1]).indices[0, 0] == 0


@pytest.mark.parametrize(("scale", "offset"), [(1e-9, 0), (1, 20_000)])
def test_an_index_too_coarse_for_what_it_holds_says_so(
    scale: float, offset: float, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = (FEATURES * scale + offset).astype(np.float32)
    with caplog.at_level(logging.WARNING):
        LocalMemory(store={"index": {"name": "flat"}}).fit(inputs, LABELS)
        LocalMemory(store={"index": {"name": "fp16"}}).fit(FEATURES, LABELS)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        LocalMemory(store={"index": {"name": "fp16"}}).fit(inputs, LABELS)
    assert "the index fp16 stores these embeddings too coarsely" in caplog.text


@pytest.mark.parametrize(("name", "count"), [("sq8", 300), ("pq", 1100)])
def test_an_index_learns_anew_from_what_is_far_outside(
    name: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    memory = LocalMemory(classes=["near", "far", "farther"], num_neighbors=3)
    memory.set_params(store={"index": {"name": name}})
    memory.fit(rng.uniform(size=(count, 8)), ["near"] * count)
    for label, distance in (("far", 100), ("farther", 200)):
        inputs = distance + rng.uniform(size=(40, 8))
        memory.partial_fit(inputs, [label] * 40)
        assert (memory.predict(inputs) == label).all()
    assert f"far outside of the range that the index {name} has learnt" in caplog.text


def test_a_store_takes_no_number_that_its_index_cannot_hold(tmp_path: Path) -> None:
    half = StoreSettings(index=HalfSettings())
    few = examples(3)
    large = NewExamples(few.embeddings * 1e6, few.labels, few.inputs)
    with new_store(tmp_path / "half", 2, index=HalfSettings()) as store:
        with pytest.raises(DataError, match="that the index fp16 cannot hold"):
            store.add(large)
        with pytest.raises(DataError, match="that the index fp16 cannot hold"):
            store.reembed(lambda inputs: torch.full((len(inputs), 6), 1e6), "other")
        assert (len(store), store.fingerprint) == (2, "model")
    new_store(tmp_path / "flat").close()
    with open_store(tmp_path / "flat", writable=True) as store:
        store.add(large)
    with pytest.raises(DataError, match="that the index fp16 cannot hold"):
        configure_store(tmp_path / "flat", half)
    configure_store(tmp_path / "half", StoreSettings())
    open_store(tmp_path / "flat").close()
