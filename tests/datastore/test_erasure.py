from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.erasure import (
    CHUNK_BYTES,
    Fragments,
    Secrets,
    distinctive,
    prove_absence,
    search,
    stored_rows,
)
from knnper.datastore.examples import (
    Ids,
    InputLayout,
    NewExamples,
    Selection,
    StoreSpec,
)
from knnper.datastore.index import INDEX_KINDS
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import DATABASE, Store, create_store, open_store

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


def by_hand(folder: Path, secrets: list[bytes]) -> set[str]:
    """Return the files that hold 64 bytes of a secret; as plain as can be."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    slices = [one[at : at + 64] for one in secrets for at in range(0, len(one), 64)]
    return {
        path.suffix or path.name
        for path, content in files.items()
        if any(part in content for part in slices)
    }


def drop(store: Store, folder: Path, ids: Ids) -> list[bytes]:
    """Delete examples; return the bytes that were theirs."""
    secrets = stored_bytes(folder, ids)
    store.delete(Selection(ids=tuple(ids.tolist())))
    return secrets


def stored_bytes(folder: Path, ids: Ids) -> list[bytes]:
    return [content for _, content in stored_rows(folder, ids)]


def places_of(folder: Path, secrets: list[bytes]) -> set[tuple[Path, int]]:
    """Return the files and offsets at which a piece of a secret is found."""
    return set().union(*search(folder, Fragments(secrets))[0].values())


def require_clean(folder: Path, secrets: list[bytes]) -> None:
    assert by_hand(folder, secrets) == set()
    proof = prove_absence(folder, Secrets((one.hex(), one) for one in secrets))
    assert proof.holds
    assert proof.unprovable == ()
    assert proof.num_secrets == len(secrets)


@pytest.mark.parametrize(
    "index", ["flat", "hnsw", pytest.param("sq8", marks=pytest.mark.slow)]
)
def test_nothing_is_left_of_what_was_deleted(tmp_path: Path, index: str) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(index=INDEX_KINDS[index]())
    with create_store(folder, SPEC, DIM, "first", chosen) as store:
        store.add(some(300, 1))
        store.save()
        secrets = drop(store, folder, store.contents().ids[5:290:28])
        store.add(some(60, 2))
        store.save()
        secrets += drop(store, folder, store.contents().ids[-30::10])
        assert len(secrets) == 2 * (11 + 3)
        # While the store is open, and once it is closed and its index saved.
        require_clean(folder, secrets)
    assert places_of(folder, secrets) == set()
    with open_store(folder) as reader:
        assert len(reader) == 300 - 11 + 60 - 3
        assert places_of(folder, secrets) == set()


@pytest.mark.parametrize("index", ["hnsw", pytest.param("sq8", marks=pytest.mark.slow)])
def test_nothing_is_left_after_evictions_and_reembedding(
    tmp_path: Path, index: str
) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings("fifo", 200, index=INDEX_KINDS[index]())
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
    require_clean(folder, secrets)


def test_it_is_found_before_it_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    chosen = StoreSettings(index=INDEX_KINDS["hnsw"]())
    with create_store(folder, SPEC, DIM, "first", chosen) as store:
        store.add(some(50, 1))
        secrets = stored_bytes(folder, store.contents().ids[:5])
        # What was added is in the log until that is copied.
        found = {file.name for file, _ in places_of(folder, secrets)}
        assert found == {f"{DATABASE}-wal"}
        assert by_hand(folder, secrets) == {".sqlite3-wal"}
        store.save()
    assert by_hand(folder, secrets) == {".sqlite3", ".index"}
    inputs, embeddings = secrets[:5], secrets[5:]
    for parts, suffixes in (
        (inputs, {".sqlite3"}),
        (embeddings, {".sqlite3", ".index"}),
    ):
        places = places_of(folder, parts)
        assert {file.suffix for file, _ in places} == suffixes
        for file, offset in places:
            content = file.read_bytes()[offset : offset + 16]
            assert any(content in part for part in parts)


def test_what_others_have_too_is_no_trace(tmp_path: Path) -> None:
    """A border that is in all images tells nothing of the one that was deleted."""
    folder = tmp_path / "store"
    new = some(40, 1)
    assert new.inputs is not None
    border = some(1, 9).inputs
    assert border is not None
    new.inputs[:, :8] = border[:, :8]
    new.inputs[1] = new.inputs[0]  # a duplicate
    new.inputs[2, 8:] = 255  # nothing of its own
    with create_store(folder, SPEC, DIM, "first") as store:
        store.add(new)
        secrets = Secrets(stored_rows(folder, np.array([1, 3, 4])))
        store.delete(Selection(ids=(1, 3, 4)))
    proof = prove_absence(folder, secrets)
    assert proof.traces == ()
    assert proof.copies == {0: 2}
    assert proof.unprovable == (1,)
    assert not proof.holds


def test_pieces_across_chunks_are_found(tmp_path: Path) -> None:
    secret = np.random.default_rng(0).bytes(16)
    content = bytearray(np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 100))
    offsets = [0, 33, CHUNK_BYTES - 9, 2 * CHUNK_BYTES - 16, 2 * CHUNK_BYTES + 84]
    for offset in offsets:
        content[offset : offset + 16] = secret
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(content)
    assert sorted(offset for _, offset in places_of(tmp_path, [secret])) == offsets
    assert search(tmp_path, Fragments([secret]))[1:] == (1, len(content))


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def found(fragments: Fragments, content: bytes) -> list[tuple[int, bytes]]:
    return list(fragments.find(np.frombuffer(content, np.uint8)))


def test_fragments_are_taken_where_something_is() -> None:
    secret = bytes(256 + 100) + noise(156) + bytes(512)
    fragment, *others = distinctive(secret)
    assert others == []
    # Windows begin at multiples of 16: this one holds four zeros, then noise.
    assert fragment == secret[352:368]


@pytest.mark.parametrize("secret", [b"", bytes(3072), bytes([7, 9]) * 600, b"\1\2\3\4"])
def test_what_is_plain_or_short_cannot_be_proven(secret: bytes) -> None:
    fragments = Fragments([secret, noise(64)])
    assert fragments.unprovable == [0]
    assert fragments.num_secrets == 2


def test_a_fragment_of_several_secrets_is_of_all() -> None:
    shared = noise(16)
    fragments = Fragments([shared, noise(16, 1), shared])
    assert fragments.owners[shared] == [0, 2]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(8, 900), min_size=1, max_size=5),
    before=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_is_there_is_found_at_any_place(
    lengths: list[int], before: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    secrets = [rng.bytes(length) for length in lengths]
    fragments = Fragments(secrets)
    content = b"\0".join([rng.bytes(before), *secrets, rng.bytes(9)])
    expected = {
        (place, fragment)
        for fragment in fragments.owners
        for place in range(len(content))
        if content.startswith(fragment, place)
    }
    assert set(found(fragments, content)) == expected
    provable = [one for i, one in enumerate(secrets) if i not in fragments.unprovable]
    assert {owner for _, one in expected for owner in fragments.owners[one]} == {
        secrets.index(one) for one in provable
    }
