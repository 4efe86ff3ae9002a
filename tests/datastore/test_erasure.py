from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import (
    Ids,
    InputLayout,
    NewExamples,
    Selection,
    StoreSpec,
)
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import Store, create_store, open_store
from tests.datastore.erased_bytes import files_with, stored_bytes
from tests.datastore.index_kinds import KINDS

SHAPE, DIM, NUM_CLASSES = (32, 32, 3), 512, 4
SPEC = StoreSpec(NUM_CLASSES, InputLayout(SHAPE))


def embed(inputs: Tensor, seed: int = 0) -> Tensor:
    """Return embeddings that are as different as the inputs."""
    rng = np.random.default_rng(seed)
    mixing = torch.from_numpy(rng.normal(size=(3072, DIM)).astype(np.float32))
    return inputs.flatten(1).float() @ mixing


def some(count: int, seed: int) -> NewExamples:
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, NUM_CLASSES, count))
    return NewExamples(embed(inputs), labels, inputs)


def drop(store: Store, folder: Path, ids: Ids) -> list[bytes]:
    """Delete examples; return the bytes that were theirs."""
    secrets = stored_bytes(folder, ids)
    store.delete(Selection(ids=tuple(ids.tolist())))
    return secrets


@pytest.mark.parametrize(
    "index",
    [
        "flat",
        pytest.param("graph", marks=pytest.mark.integration),
        pytest.param("scalar", marks=pytest.mark.slow),
    ],
)
def test_deletion_erases_all_bytes(tmp_path: Path, index: str) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(index=KINDS[index])
    with create_store(folder, SPEC, DIM, "first", chosen) as store:
        store.add(some(300, 1))
        store.save()
        secrets = drop(store, folder, store.contents().ids[5:290:28])
        store.add(some(60, 2))
        store.save()
        secrets += drop(store, folder, store.contents().ids[-30::10])
        assert len(secrets) == 2 * (11 + 3)
        # While the store is open, and once it is closed and its index saved.
        assert files_with(folder, secrets) == set()
    assert files_with(folder, secrets) == set()
    with open_store(folder) as reader:
        assert len(reader) == 300 - 11 + 60 - 3
        assert files_with(folder, secrets) == set()


@pytest.mark.parametrize(
    "index", ["graph", pytest.param("scalar", marks=pytest.mark.slow)]
)
def test_deletion_erases_bytes_of_evicted_examples_and_old_embeddings(
    tmp_path: Path, index: str
) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings("fifo", 200, index=KINDS[index])
    with create_store(folder, SPEC, DIM, "first", chosen) as store:
        store.add(some(180, 1))
        secrets = drop(store, folder, store.contents().ids[::60])
        evicted = stored_bytes(folder, store.contents().ids[:50:5])
        store.add(some(100, 2))
        store.reembed(lambda inputs: embed(inputs, seed=1), "second")
        store.add(some(20, 3))
        ids = store.contents().ids[3::30]
        of_all_versions = drop(store, folder, ids)
        # The last twenty have no embedding by the first model.
        assert len(of_all_versions) == 3 * len(ids) - int((ids > 280).sum())
        # Each deletion takes what was evicted before out of the files, too.
        secrets += of_all_versions + evicted
    assert files_with(folder, secrets) == set()


def test_search_finds_bytes_of_stored_examples(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(index=KINDS["graph"])
    with create_store(folder, SPEC, DIM, "first", chosen) as store:
        store.add(some(50, 1))
        secrets = stored_bytes(folder, store.contents().ids[:5])
        # Additions stay in the log until it is copied into the database.
        assert files_with(folder, secrets) == {".sqlite3-wal"}
        store.save()
    inputs, embeddings = secrets[:5], secrets[5:]
    assert files_with(folder, inputs) == {".sqlite3"}
    assert files_with(folder, embeddings) == {".sqlite3", ".index"}
