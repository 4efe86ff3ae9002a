"""The index on disk: a cache of the database, used only when it is what was saved."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import faiss
from pydantic_core import to_jsonable_python

from knnper.datastore.database import Rows, Version
from knnper.datastore.examples import StoreDamagedError, StoreError
from knnper.datastore.index import VectorIndex
from knnper.datastore.index_kinds import IndexSettings
from knnper.files import sync_to_disc, write_atomically

_LOG = logging.getLogger(__name__)

MANIFEST = "manifest.json"

FORMAT = 1


@dataclass(frozen=True)
class IndexCache:
    """An index file and its manifest, in a folder.

    The manifest says which save this is, of which version and kind, and the file's
    checksum. The database notes the token of its last save, so an index from a backup
    of another moment, or of another store, is not taken for its own. What was added or
    removed since the save is seen by the ids.
    """

    folder: Path  # holds nothing else; created when something is saved
    rows: Rows

    def load(self, version: Version, settings: IndexSettings) -> VectorIndex | None:
        """Return the saved index of a version; None where it cannot be relied on."""
        reason = self.distrust(version, settings)
        if reason is not None:
            if self.folder.is_dir():  # else there never was one
                _LOG.info("the index in %s is built anew: %s", self.folder, reason)
            return None
        try:
            return settings.read(self._index_file(), version.embedding_dim)
        except (StoreDamagedError, OSError) as error:
            _LOG.warning("the index in %s is built anew: %s", self.folder, error)
            return None

    def save(
        self, index: VectorIndex, version: Version, settings: IndexSettings
    ) -> None:
        """Save the index; a failure leaves none, and is no error of the store."""
        token = uuid4().hex
        try:
            self.folder.mkdir(exist_ok=True)
            file = self.folder / f"{token}.index"
            index.write(file)
            _sync(file)
            manifest = {
                **_identity(token, version, settings),
                "num_examples": len(index),
                "sha256": file_sha256(file),
            }
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=2))
            self.rows.set_index_token(token)
            self.remove_leftovers()
        except (OSError, RuntimeError, StoreError) as error:
            _LOG.warning("the index is not saved in %s: %s", self.folder, error)
            self.clear()

    def clear(self) -> None:
        """Leave no trace of what was saved."""
        if self.folder.is_dir():
            for path in self._files():
                path.unlink()
            sync_to_disc(self.folder)

    def remove_leftovers(self) -> None:
        """Remove what a save that was cut short, or an earlier one, has left."""
        wanted = {MANIFEST, f"{self.rows.index_token()}.index"}
        for path in self._files():
            if path.name not in wanted:
                path.unlink()

    def distrust(self, version: Version, settings: IndexSettings) -> str | None:
        """Return why the saved index cannot be relied on; None if it can."""
        try:
            manifest = self.manifest()
            expected = _identity(self.rows.index_token(), version, settings)
            for key, value in expected.items():
                if manifest.get(key) != value:
                    return f"{key} is {manifest.get(key)!r}, expected {value!r}"
            if file_sha256(self._index_file()) != manifest["sha256"]:
                return "its checksum is not that of its manifest"
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def manifest(self) -> dict[str, Any]:
        """Return what was noted when the index was saved."""
        try:
            found = json.loads((self.folder / MANIFEST).read_bytes())
        except RecursionError as error:
            raise ValueError("it is no JSON of a few levels") from error
        if not isinstance(found, dict):
            raise ValueError(f"found {type(found).__name__}, expected an object")
        return found

    def _files(self) -> Iterator[Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else iter(())
        return (path for path in found if not path.is_dir() or path.is_symlink())

    def _index_file(self) -> Path:
        return self.folder / f"{self.rows.index_token()}.index"


def _identity(
    token: str, version: Version, settings: IndexSettings
) -> Mapping[str, Any]:
    return {
        "format": FORMAT,
        "token": token,
        "version": version.number,
        "fingerprint": version.fingerprint,
        "embedding_dim": version.embedding_dim,
        "settings": to_jsonable_python(settings),
        "faiss": faiss.__version__,
    }


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
