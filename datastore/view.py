"""The index on disk: a cache of the database, used only when it is what was saved."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from uuid import uuid4

import faiss
import numpy as np
import torch
from pydantic_core import to_jsonable_python
from torch import Tensor

from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    Neighbors,
    NotErasedError,
    StoreDamagedError,
    StoreError,
)
from knnper.datastore.index import VectorIndex, Vectors
from knnper.datastore.index_kinds import IndexSettings
from knnper.datastore.ranking import nearest
from knnper.datastore.rows import Change, Head, Rows, Version
from knnper.files import sync_folder, write_atomically

_LOG = logging.getLogger(__name__)

MANIFEST = "manifest.json"

FORMAT = 1


class Tokens(Protocol):
    """Where the database notes which save of the index is its own."""

    def index_token(self) -> str:
        """Return the token of the last save; empty if there is none."""

    def set_index_token(self, token: str) -> None:
        """Note a save."""


class Cache(Protocol):
    """Keeps an index between two openings of a store."""

    def load(self, version: Version, settings: IndexSettings) -> VectorIndex | None:
        """Return the saved index of a version; None where it cannot be relied on."""

    def save(
        self, index: VectorIndex, version: Version, settings: IndexSettings
    ) -> None:
        """Save the index; a failure leaves none, and is no error of the store."""

    def clear(self) -> None:
        """Leave no trace of what was saved."""


class NoCache:
    """For stores that end with the process."""

    def load(self, version: Version, settings: IndexSettings) -> VectorIndex | None:
        """Return None."""

    def save(
        self, index: VectorIndex, version: Version, settings: IndexSettings
    ) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class IndexCache:
    """An index file and its manifest, in a folder."""

    folder: Path
    tokens: Tokens

    def load(self, version: Version, settings: IndexSettings) -> VectorIndex | None:
        """See `Cache`."""
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
        """See `Cache`."""
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
            self.tokens.set_index_token(token)
            self.remove_leftovers()
        except (OSError, RuntimeError, StoreError) as error:
            _LOG.warning("the index is not saved in %s: %s", self.folder, error)
            self.clear()

    def clear(self) -> None:
        """See `Cache`."""
        if self.folder.is_dir():
            for path in self._files():
                path.unlink()
            sync_folder(self.folder)

    def remove_leftovers(self) -> None:
        """Remove what a save that was cut short, or an earlier one, has left."""
        wanted = {MANIFEST, f"{self.tokens.index_token()}.index"}
        for path in self._files():
            if path.name not in wanted:
                path.unlink()

    def distrust(self, version: Version, settings: IndexSettings) -> str | None:
        """Return why the saved index cannot be relied on; None if it can."""
        try:
            manifest = self.manifest()
            expected = _identity(self.tokens.index_token(), version, settings)
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
        return self.folder / f"{self.tokens.index_token()}.index"


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


class ReadWriteLock:
    """Lets any number of readers in together, and a writer alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._num_readers = 0
        self._num_waiting = 0
        self._is_written = False
        # Made once: a query that takes a millisecond would notice a generator.
        self.reading = _Turn(self._enter_reader, self._leave_reader)
        self.writing = _Turn(self._enter_writer, self._leave_writer)

    def _enter_reader(self) -> None:
        with self._condition:
            while self._is_written or self._num_waiting:
                self._condition.wait()
            self._num_readers += 1

    def _leave_reader(self) -> None:
        with self._condition:
            self._num_readers -= 1
            if self._num_waiting and not self._num_readers:
                self._condition.notify_all()

    def _enter_writer(self) -> None:
        with self._condition:
            self._num_waiting += 1
            try:
                while self._is_written or self._num_readers:
                    self._condition.wait()
            finally:
                # Also when it is interrupted: readers would wait for it for ever.
                self._num_waiting -= 1
                self._condition.notify_all()
            self._is_written = True

    def _leave_writer(self) -> None:
        with self._condition:
            self._is_written = False
            self._condition.notify_all()


class _Turn:
    """Enters and leaves by two functions."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()


ReadVectors = Callable[[Ids], Vectors]
"""Reads stored embeddings (m, p) from where the truth is; each id is asked for once."""


class View:
    """An index and the contents that belong to it; searches and changes may overlap."""

    def __init__(
        self,
        index: VectorIndex,
        contents: Contents,
        settings: IndexSettings,
        version: Version,
        read_vectors: ReadVectors,
    ) -> None:
        self._lock = ReadWriteLock()
        self._index = index
        self._contents = contents
        self._settings = settings
        self.version = version
        self._read_vectors = read_vectors

    @property
    def contents(self) -> Contents:
        """What the store holds."""
        return self._contents

    @property
    def index(self) -> VectorIndex:
        """The index; only the thread that changes the view may use it."""
        return self._index

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest examples; see `Store.search`."""
        asked = np.ascontiguousarray(queries.detach().numpy())
        with self._lock.reading:
            num_found = min(num_neighbors, len(self._contents))
            if num_found == 0 or len(asked) == 0:
                return _none(len(asked), num_found)
            distances, ids = nearest(
                asked, self._index, self._settings, num_found, self._read_vectors
            )
            contents = self._contents
            labels = contents.labels[contents.ids.searchsorted(ids)]
        return Neighbors(
            torch.from_numpy(distances), torch.from_numpy(labels), torch.from_numpy(ids)
        )

    def vectors(self, ids: Ids) -> Vectors:
        """Return stored embeddings (m, p) by id, as they were added."""
        with self._lock.reading:
            return self._vectors_of(ids)

    def change(self, added: Contents, vectors: Vectors, removed: Ids) -> None:
        """Remove some examples and add others, at once for whoever searches."""
        with self._lock.writing:
            if len(removed):
                self._index.remove(removed)
                self._contents = self._contents.without(removed)
            if len(added):
                self._index.add(added.ids, vectors)
                self._contents = self._contents.followed_by(added)

    def rebuild(self) -> None:
        """Build the index anew from the vectors; searches go on meanwhile."""
        ids = self._contents.ids
        keeps = self._index.keeps_vectors
        vectors = self._index.vectors(ids) if keeps else self._read_vectors(ids)
        self.replace(
            self._settings.build(self._index.dim, ids, vectors), self._contents
        )

    def replace(self, index: VectorIndex, contents: Contents) -> None:
        """Search another index from now on."""
        with self._lock.writing:
            self._index, self._contents = index, contents

    def _vectors_of(self, ids: Ids) -> Vectors:
        if self._index.keeps_vectors:
            return self._index.vectors(ids)
        return self._read_vectors(ids)


def _none(num_queries: int, num_found: int) -> Neighbors:
    ids = torch.empty((num_queries, num_found), dtype=torch.int64)
    return Neighbors(ids.double(), ids, ids)


def bring_up_to_date(
    index: VectorIndex, contents: Contents, read_vectors: ReadVectors
) -> int:
    """Make ``index`` hold the ids of ``contents``; return how many it had to change."""
    gone = np.setdiff1d(index.ids, contents.ids)
    missing = np.setdiff1d(contents.ids, index.ids)
    if len(gone):
        index.remove(gone)
    if len(missing):
        index.add(missing, read_vectors(missing))
    return len(gone) + len(missing)


SAVE_AFTER, SAVE_AFTER_SHARE = 1000, 0.25
"""An index is saved when so many examples, and this share of all, have changed: what
changed since is built again after a kill. A flat one is built as fast as it is read."""


class LiveView:
    """What is searched, and how it follows what becomes of the rows."""

    def __init__(self, rows: Rows, cache: Cache, settings: IndexSettings) -> None:
        self._rows, self._cache, self._settings = rows, cache, settings
        self._refreshing, self._renewing = threading.Lock(), threading.Lock()
        self._num_unsaved = 0
        self._is_behind = self._is_torn = False
        with rows.reading():
            self._open()

    def _open(self) -> None:
        """Take up what the rows are now; called inside `Rows.reading`."""
        self.head = self._rows.head()
        contents = self._rows.contents()
        active = self.head.active
        index = self._cache.load(active, self._settings)
        if index is not None:
            changed = bring_up_to_date(index, contents, self._reads(active))
        if index is None or index.is_outgrown:
            index = self._build(active, contents.ids)
            changed = len(contents)
        self._num_unsaved = changed
        self.view = self._view(index, contents, active)

    def refresh(self) -> None:
        """See what another process has changed."""
        with self._refreshing:
            has_changed = self._rows.has_changed()
            self._is_behind |= has_changed
            if self._is_behind or self._is_torn:
                with self._torn_if_cut_short():
                    self._catch_up()
                self._is_behind = self._is_torn = False
        if has_changed and self.view.index.is_outgrown:
            self._renew()

    def _catch_up(self) -> None:
        with self._rows.reading():
            head = self._rows.head()
            if self._is_torn or head.active != self.head.active:
                self._open()
                return
            added, removed = self._difference(head)
            vectors = self._reads(head.active)(added.ids)
        # Not inside the block above: a search may hold the view and wait for the rows.
        self.view.change(added, vectors, removed)
        self.head = head

    def _renew(self) -> None:
        """Build a reader's index anew: this thread waits for it, no other does."""
        if not self._renewing.acquire(blocking=False):
            return
        try:
            # The writer may go on meanwhile; its next change is another chance.
            with contextlib.suppress(ExamplesMissingError):
                version = self.view.version
                index = self.built(version)
                with self._refreshing:
                    if version == self.view.version:
                        contents = self.view.contents
                        bring_up_to_date(index, contents, self._reads(version))
                        self.view.replace(index, contents)
        finally:
            self._renewing.release()

    @contextlib.contextmanager
    def _torn_if_cut_short(self) -> Iterator[None]:
        """Take everything up anew, before the next answer, if the block fails."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            raise

    def _difference(self, head: Head) -> tuple[Contents, Ids]:
        """Return what the rows have and the view lacks, and the other way round."""
        held = self.view.contents
        if head.num_removed == self.head.num_removed:
            last = int(held.ids[-1]) if len(held) else 0
            return self._rows.contents(after=last), np.empty(0, np.int64)
        now = self._rows.contents()
        removed = np.setdiff1d(held.ids, now.ids)
        return now.take(np.isin(now.ids, held.ids, invert=True)), removed

    def apply(self, change: Change) -> None:
        """Make a change for good, then let searches see it."""
        vectors = change.embeddings
        if vectors is None:
            vectors = np.empty((0, self.head.active.embedding_dim), np.float32)
        try:
            self._rows.apply(change)
        except BaseException:
            # A disk may fail after it was done, and an interrupt come: look again.
            self._is_behind = True
            raise
        with self._torn_if_cut_short(), self._refreshing:
            self.head = self._rows.head()
            self.view.change(change.added, vectors, change.removed)
        self._num_unsaved += len(change.added) + len(change.removed)

    def built(self, version: Version) -> VectorIndex:
        """Return an index of what a version has now; searches go on meanwhile."""
        with self._rows.reading():
            ids = self._rows.contents().ids
            lacking = self._rows.without_vector(version.number, 0, len(ids))
            ids = np.setdiff1d(ids, lacking)
            vectors = self._rows.vectors(ids, version.number)
        return self._settings.build(version.embedding_dim, ids, vectors)

    def switch(self, version: Version, index: VectorIndex) -> None:
        """Search another version, which is complete, from now on, for good."""
        contents = self._rows.contents()
        if not index.forgets and len(np.setdiff1d(index.ids, contents.ids)):
            # It would keep a trace of what was deleted since it was built.
            index = self._build(version, contents.ids)
        bring_up_to_date(index, contents, self._reads(version))
        with self._torn_if_cut_short():
            self._rows.activate(version.number)
            with self._refreshing:
                self.view = self._view(index, contents, version)
                self.head = self._rows.head()
        self.save()

    def save(self) -> None:
        """Save the index."""
        self._cache.save(self.view.index, self.head.active, self._settings)
        self._num_unsaved = 0

    def save_if_changed(self) -> None:
        """Save the index if it is not what was saved."""
        if self._num_unsaved:
            self.save()

    def save_if_outdated(self) -> None:
        """Save the index if building the difference would take long."""
        enough = max(SAVE_AFTER, SAVE_AFTER_SHARE * len(self.view.contents))
        if not self._settings.is_exhaustive and self._num_unsaved > enough:
            self.save()

    def forget(self) -> None:
        """Leave no trace of what was removed, in the index nor on disk."""
        self._num_unsaved = max(1, len(self.view.contents))
        if not self.view.index.forgets:
            self.view.rebuild()
        try:
            self._cache.clear()
            self._rows.erase_removed()
        except (StoreError, OSError) as error:
            raise NotErasedError(
                "what was deleted is not found any more, but its bytes are not erased "
                f"yet: {error}. Then run: knnper store compact"
            ) from error

    def _build(self, version: Version, ids: Ids) -> VectorIndex:
        vectors = self._rows.vectors(ids, version.number)
        return self._settings.build(version.embedding_dim, ids, vectors)

    def _view(self, index: VectorIndex, contents: Contents, version: Version) -> View:
        return View(index, contents, self._settings, version, self._reads(version))

    def _reads(self, version: Version) -> ReadVectors:
        return functools.partial(self._rows.vectors, version=version.number)
