"""The saved index: trusted only when it is what was saved."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from knnper.datastore.store import INDEX, open_store
from tests.datastore.small_store import examples, ids, new_store


def tamper(folder: Path) -> None:
    file = next((folder / INDEX).glob("*.index"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rename_version(folder: Path) -> None:
    path = folder / INDEX / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "fingerprint": "another"}))


def truncate(folder: Path) -> None:
    file = next((folder / INDEX).glob("*.index"))
    file.write_bytes(file.read_bytes()[:50])


def remove(folder: Path) -> None:
    next((folder / INDEX).glob("*.index")).unlink()


def foreign(folder: Path) -> None:
    """Put the index of another store, with its manifest, in place of this one's."""
    other = folder.with_name("other")
    new_store(other, 9).close()
    shutil.rmtree(folder / INDEX)
    shutil.copytree(other / INDEX, folder / INDEX)


@pytest.mark.parametrize("damage", [tamper, rename_version, truncate, remove, foreign])
def test_an_index_that_is_not_what_was_saved_is_built_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    new_store(tmp_path / "s", 9).close()
    damage(tmp_path / "s")
    caplog.set_level(logging.INFO)
    with open_store(tmp_path / "s", writable=True) as store:
        assert "is built anew" in caplog.text
        found = store.search(examples(9).embeddings, 1)
        assert found.ids[:, 0].tolist() == ids(store)
    caplog.clear()
    open_store(tmp_path / "s").close()
    assert "is built anew" not in caplog.text


def test_a_valid_index_is_used_and_brought_up_to_date(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tmp_path / "s", 9)
    store.save()
    store.add(examples(2, seed=5))
    copy = tmp_path / "copy"
    # As a kill would leave it: the index is older than the database.
    shutil.copytree(tmp_path / "s", copy)
    store.close()
    caplog.set_level(logging.INFO)
    with open_store(copy) as reader:
        assert reader.search(examples(2, seed=5).embeddings, 1).ids.tolist() == [
            [10],
            [11],
        ]
    assert "is built anew" not in caplog.text
