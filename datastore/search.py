"""What is searched: an index, the contents it belongs to, and how both follow the rows.

An index finds candidates in float32, or by rounded codes. Their distances are computed
anew in float64, and where rounding or ties leave a doubt, all examples are compared. So
a query's neighbours do not depend on the other queries, and no distance overflows.
"""

import contextlib
import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python
from torch import Tensor

from knnper.datastore.database import Change, Rows
from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    Neighbors,
    NotErasedError,
    StoreDamagedError,
    StoreError,
)
from knnper.datastore.index import (
    EPS,
    NOTHING,
    QUERIES_AT_ONCE,
    ROWS_AT_ONCE,
    TINY,
    FlatIndex,
    IndexSettings,
    VectorIndex,
    Vectors,
)
from knnper.datastore.tables import Version
from knnper.files import open_plain, read_plain, sync_to_disc, write_atomically

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
        reason: object = self.distrust(version, settings)
        if reason is None:
            try:
                return settings.read(self._index_file(), version.embedding_dim)
            except (StoreDamagedError, OSError) as error:
                reason = error
        if self.folder.is_dir():  # else there never was one
            _LOG.info("the index in %s is built anew: %s", self.folder, reason)
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
            sync_to_disc(file)
            manifest = {
                **_identity(token, version, settings),
                "num_examples": len(index),
                "sha256": file_sha256(file),
            }
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=2))
            with self.rows.writing() as (_, row):
                row.index_token = token
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
        wanted = {MANIFEST, f"{self.rows.row().index_token}.index"}
        for path in self._files():
            if path.name not in wanted:
                path.unlink()

    def distrust(self, version: Version, settings: IndexSettings) -> str | None:
        """Return why the saved index cannot be relied on; None if it can."""
        try:
            manifest = self.manifest()
            expected = _identity(self.rows.row().index_token, version, settings)
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
            found = json.loads(read_plain(self.folder / MANIFEST))
        except RecursionError as error:
            raise ValueError("it is no JSON of a few levels") from error
        if not isinstance(found, dict):
            raise ValueError(f"found {type(found).__name__}, expected an object")
        return found

    def _files(self) -> Iterator[Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else iter(())
        return (path for path in found if not path.is_dir() or path.is_symlink())

    def _index_file(self) -> Path:
        return self.folder / f"{self.rows.row().index_token}.index"


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
    with open_plain(path) as file:
        return hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()


Distances = NDArray[np.float64]
VectorsOf = Callable[[Ids], Vectors]


def nearest(
    queries: Vectors,
    index: VectorIndex,
    settings: IndexSettings,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    """Return squared distances, ascending, and ids, both (m, num_found)."""
    parts = [
        _nearest(
            queries[start : start + QUERIES_AT_ONCE],
            index=index,
            settings=settings,
            num_found=num_found,
            read_vectors=read_vectors,
        )
        for start in range(0, len(queries), QUERIES_AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    return (
        np.concatenate([distances for distances, _ in parts]),
        np.concatenate([ids for _, ids in parts]),
    )


def _nearest(
    queries: Vectors,
    *,
    index: VectorIndex,
    settings: IndexSettings,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    # 1. Find candidates, and the exact distances to them.
    count = min(settings.candidates_for(num_found), len(index))
    if isinstance(index, FlatIndex):
        (rough, ids), vectors = index.candidates_with_vectors(queries, count)
        distances = _squared_distances(queries[:, None], vectors)
    elif settings.ranks_exactly:
        rough, ids = index.candidates(queries, count)
        # No id is read twice.
        known = np.where(ids == NOTHING, index.ids[:1], ids)
        unique, positions = np.unique(known, return_inverse=True)
        vectors = read_vectors(unique)[positions.reshape(ids.shape)]
        distances = _squared_distances(queries[:, None], vectors)
        distances[ids == NOTHING] = np.inf
    else:
        rough, ids = index.candidates(queries, count)
        distances = rough.astype(np.float64)
    distances, found = _first(distances, ids, num_found)
    # 2. Compare all vectors with the queries of which the result is in doubt.
    certain = (found != NOTHING).all(axis=1)
    if settings.is_exhaustive and count < len(index):
        # The last candidate's exact distance is larger than its rounded one less this.
        bound = rough[:, -1].astype(np.float64) * (1 - (index.dim + 8) * EPS)
        certain &= distances[:, -1] < bound - index.dim * TINY
    vectors_of = index.vectors if index.keeps_vectors else read_vectors
    for row in np.flatnonzero(~certain).tolist():
        distances[row], found[row] = _scan(
            queries[row], index.ids, num_found, vectors_of
        )
    return distances, found


def _scan(
    query: Vectors, ids: Ids, num_found: int, vectors_of: VectorsOf
) -> tuple[Distances, Ids]:
    """Return the nearest of one query (p,) among all ``ids``, by brute force."""
    ids = np.sort(ids)
    parts = [ids[i : i + ROWS_AT_ONCE] for i in range(0, len(ids), ROWS_AT_ONCE)]
    distances = np.concatenate(
        [_squared_distances(query, vectors_of(part)) for part in parts]
    )
    nearest_distances, nearest_ids = _first(distances[None], ids[None], num_found)
    return nearest_distances[0], nearest_ids[0]


def _squared_distances(queries: Vectors, vectors: Vectors) -> Distances:
    """Return float64 of the shape that the arguments broadcast to, less the last."""
    difference = vectors.astype(np.float64)
    difference -= queries
    squares: Distances = np.einsum("...p,...p->...", difference, difference)
    return squares


def _first(distances: Distances, ids: Ids, count: int) -> tuple[Distances, Ids]:
    """Return the nearest ``count`` of each row; of equals, the smaller ids."""
    order = np.lexsort((ids, distances))[:, :count]
    rows = np.arange(len(distances))[:, None]
    return distances[rows, order], ids[rows, order]


@dataclass(frozen=True)
class View:
    """An index and the contents that belong to it, with the same ids."""

    index: VectorIndex
    contents: Contents
    settings: IndexSettings
    version: Version  # whose embeddings these are
    read_vectors: VectorsOf  # from where the truth is; each id is asked for once

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest examples; see `Store.search`."""
        asked = np.ascontiguousarray(queries.detach().numpy())
        num_found = min(num_neighbors, len(self.contents))
        if num_found == 0 or len(asked) == 0:
            none = torch.empty((len(asked), num_found), dtype=torch.int64)
            return Neighbors(none.double(), none, none)
        distances, ids = nearest(
            asked, self.index, self.settings, num_found, self.read_vectors
        )
        labels = self.contents.labels[self.contents.positions(ids)]
        return Neighbors(
            torch.from_numpy(distances), torch.from_numpy(labels), torch.from_numpy(ids)
        )

    def vectors(self, ids: Ids) -> Vectors:
        """Return stored embeddings (m, p) by id, as they were added."""
        return (self.index.vectors if self.index.keeps_vectors else self.read_vectors)(
            ids
        )


def bring_up_to_date(
    index: VectorIndex, contents: Contents, read_vectors: VectorsOf
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

    def __init__(
        self, rows: Rows, cache: IndexCache | None, settings: IndexSettings
    ) -> None:
        self._rows, self._cache, self._settings = rows, cache, settings
        # Held while the view is searched or changed. Searches of several threads wait
        # for each other: FAISS fills the memory bus, so together they are no faster.
        self.lock = threading.Lock()
        self._refreshing, self._renewing = threading.Lock(), threading.Lock()
        self.num_unsaved = 0
        self._is_behind = self._is_torn = False
        with rows.reading():
            self._open()

    def _open(self) -> None:
        """Follow the rows as they are now; called inside `Rows.reading`."""
        self.state = self._rows.state()
        contents = self._rows.contents()
        active = self.state.active
        index = None
        if self._cache is not None:
            index = self._cache.load(active, self._settings)
        if index is not None:
            changed = bring_up_to_date(index, contents, self._reads(active))
        if index is None or index.is_outgrown:
            index = self._build(active, contents.ids)
            changed = len(contents)
        self.num_unsaved = changed
        self.view = self._view(index, contents, active)

    def refresh(self) -> None:
        """See what another process has changed."""
        # Whoever asks while another thread does this waits for it: otherwise it might
        # find what was deleted before it asked.
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
            head, held = self._rows.state(), self.view.contents
            if self._is_torn or head.active != self.state.active:
                self._open()
                return
            if head.num_removed == self.state.num_removed:
                removed = np.empty(0, np.int64)
                added = self._rows.contents(after=int(held.ids.max(initial=0)))
            else:
                now = self._rows.contents()
                removed = np.setdiff1d(held.ids, now.ids)
                added = now.take(np.isin(now.ids, held.ids, invert=True))
            vectors = self._reads(head.active)(added.ids)
        # Not inside the block above: a search may hold the view and wait for the rows.
        self._change(added, vectors, removed)
        self.state = head

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
                        with self.lock:
                            self.view = self._view(index, contents, version)
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

    def apply(self, change: Change) -> None:
        """Make a change for good, then let searches see it."""
        vectors = change.embeddings
        if vectors is None:
            vectors = np.empty((0, self.state.active.embedding_dim), np.float32)
        try:
            self._rows.apply(change)
        except BaseException:
            # A disk may fail after it was done, and an interrupt come: look again.
            self._is_behind = True
            raise
        with self._torn_if_cut_short(), self._refreshing:
            self.state = self._rows.state()
            self._change(change.added, vectors, change.removed)
        self.num_unsaved += len(change.added) + len(change.removed)

    def _change(self, added: Contents, vectors: Vectors, removed: Ids) -> None:
        """Remove some examples and add others, at once for whoever searches."""
        with self.lock:
            index, contents = self.view.index, self.view.contents
            if len(removed):
                index.remove(removed)
                contents = contents.without(removed)
            if len(added):
                index.add(added.ids, vectors)
                contents = contents.followed_by(added)
            self.view = replace(self.view, contents=contents)

    def rebuild(self) -> None:
        """Build the index anew from the vectors; searches go on meanwhile."""
        ids = self.view.contents.ids
        vectors = self.view.vectors(ids)
        index = self._settings.build(self.view.index.dim, ids, vectors)
        with self.lock:
            self.view = replace(self.view, index=index)

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
                with self.lock:
                    self.view = self._view(index, contents, version)
                self.state = self._rows.state()
        self.save()

    def save(self) -> None:
        """Save the index."""
        if self._cache is not None:
            self._cache.save(self.view.index, self.state.active, self._settings)
        self.num_unsaved = 0

    def save_if_outdated(self) -> None:
        """Save the index if building the difference would take long."""
        enough = max(SAVE_AFTER, SAVE_AFTER_SHARE * len(self.view.contents))
        if not self._settings.is_exhaustive and self.num_unsaved > enough:
            self.save()

    def forget(self) -> None:
        """Leave no trace of what was removed, in the index nor on disk."""
        self.num_unsaved = max(1, len(self.view.contents))
        if not self.view.index.forgets:
            self.rebuild()
        try:
            if self._cache is not None:
                self._cache.clear()
            self._rows.erase_removed()
        except (StoreError, OSError) as error:
            raise NotErasedError(
                "what was deleted is not found any more, but its bytes are not erased "
                f"yet: {error}. Then run: knnper store rewrite"
            ) from error

    def _build(self, version: Version, ids: Ids) -> VectorIndex:
        vectors = self._rows.vectors(ids, version.number)
        return self._settings.build(version.embedding_dim, ids, vectors)

    def _view(self, index: VectorIndex, contents: Contents, version: Version) -> View:
        return View(index, contents, self._settings, version, self._reads(version))

    def _reads(self, version: Version) -> VectorsOf:
        return functools.partial(self._rows.vectors, version=version.number)
