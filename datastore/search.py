"""Search of a store: the nearest examples, the saved index, and keeping both current.

An index finds candidates in float32, or by rounded codes. Their distances are computed
again in float64, and where rounding or ties leave a doubt, all examples are compared.
So the neighbours of a query do not depend on other queries, and no distance overflows.
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
    FlatSettings,
    IndexSettings,
    VectorIndex,
    Vectors,
)
from knnper.datastore.tables import Version
from knnper.files import open_plain, read_plain, sync_to_disc, write_atomically

_LOG = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = 2
# An approximate index is saved once this many examples, and this share of all, have
# changed: changes since the save are repeated after a kill. A flat index is built as
# fast as it is read.
SAVE_AFTER, SAVE_AFTER_SHARE = 1000, 0.25

Distances = NDArray[np.float64]
# From distinct ids (m,) to their embeddings (m, p).
VectorsOf = Callable[[Ids], Vectors]


@dataclass(frozen=True)
class IndexCache:
    """An index file and its manifest, in a folder.

    The manifest holds the token of the save, the version, the settings, and the file's
    checksum. The database holds the token of its last save, so that an index from a
    backup of another moment, or of another store, is not used. Ids show which examples
    were added or removed since the save.
    """

    folder: Path  # of the index alone; created by the first save
    rows: Rows

    def load(self, version: Version, settings: IndexSettings) -> VectorIndex | None:
        """Read the saved index of a version; None if there is none or it is invalid."""
        reason: object = self.problem(version, settings)
        if reason is None:
            try:
                return settings.read(self._index_file(), version.embedding_dim)
            except (StoreDamagedError, OSError) as error:
                reason = error
        if self.folder.is_dir():  # otherwise none was ever saved
            _LOG.info("the index in %s is rebuilt: %s", self.folder, reason)
        return None

    def save(
        self, index: VectorIndex, version: Version, settings: IndexSettings
    ) -> None:
        """Save the index; log a failure, after which no index is saved."""
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
        """Remove the saved index."""
        if self.folder.is_dir():
            for path in self._files():
                path.unlink()
            sync_to_disc(self.folder)

    def remove_leftovers(self) -> None:
        """Remove the files of interrupted and earlier saves."""
        current = {MANIFEST, f"{self.rows.row().index_token}.index"}
        for path in self._files():
            if path.name not in current:
                path.unlink()

    def problem(self, version: Version, settings: IndexSettings) -> str | None:
        """Return why the saved index cannot be used; None if it can."""
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
        """Read the manifest of the saved index."""
        try:
            document = json.loads(read_plain(self.folder / MANIFEST))
        except RecursionError as error:
            raise ValueError("its JSON has too many levels") from error
        if not isinstance(document, dict):
            raise ValueError(f"found {type(document).__name__}, expected an object")
        return document

    def _files(self) -> Iterator[Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else iter(())
        return (path for path in paths if not path.is_dir() or path.is_symlink())

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


def nearest(
    queries: Vectors,
    index: VectorIndex,
    settings: IndexSettings,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    """Return squared distances, ascending, and ids, both (m, num_found)."""
    count = min(settings.candidates_for(num_found), len(index))
    parts = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        part = queries[start : start + QUERIES_AT_ONCE]
        if isinstance(index, FlatIndex):
            parts.append(_nearest_exact(part, index, count, num_found))
        else:
            parts.append(
                _nearest_approximate(
                    part,
                    index=index,
                    ranks_exactly=settings.ranks_exactly,
                    count=count,
                    num_found=num_found,
                    read_vectors=read_vectors,
                )
            )
    if len(parts) == 1:
        return parts[0]
    return (
        np.concatenate([distances for distances, _ in parts]),
        np.concatenate([ids for _, ids in parts]),
    )


def _nearest_approximate(
    queries: Vectors,
    *,
    index: VectorIndex,
    ranks_exactly: bool,
    count: int,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    """Find ``count`` candidates, and rank them by their original vectors if asked."""
    rough, ids = index.candidates(queries, count)
    if ranks_exactly:
        # Each id is read once; padding is replaced by any id that is stored.
        known = np.where(ids == NOTHING, index.ids[:1], ids)
        unique, positions = np.unique(known, return_inverse=True)
        vectors = read_vectors(unique)[positions.reshape(ids.shape)]
        distances = _squared_distances(queries[:, None], vectors)
        distances[ids == NOTHING] = np.inf
    else:
        distances = rough.astype(np.float64)
    distances, nearest_ids = _first(distances, ids, num_found)
    # Compare all vectors with the queries for which too few were found.
    too_few = (nearest_ids == NOTHING).any(axis=1)
    for row in np.flatnonzero(too_few).tolist():
        distances[row], nearest_ids[row] = _scan(
            queries[row], index.ids, num_found, read_vectors
        )
    return distances, nearest_ids


def _nearest_exact(
    queries: Vectors, index: FlatIndex, count: int, num_found: int
) -> tuple[Distances, Ids]:
    """Find ``count`` candidates in float32, then the nearest of them in float64."""
    rough, slots = index.search(queries, count)
    ids, vectors = index.at_slots(slots)
    distances, nearest_ids = _first(
        _squared_distances(queries[:, None], vectors), ids, num_found
    )
    # Columns as lists: for a few queries, Python is faster than NumPy.
    has_others = count < len(index)
    last_slots = slots[:, -1].tolist()
    last_rough = rough[:, -1].tolist()
    last_distances = distances[:, -1].tolist()
    for row, slot in enumerate(last_slots):
        # A lower bound of the exact distance of the last candidate, and so of all
        # vectors that are no candidates: its float32 distance less the rounding error.
        bound = last_rough[row] * (1 - (index.dim + 8) * EPS) - index.dim * TINY
        # Without a slot, float32 cannot express the distance.
        if slot < 0 or (has_others and last_distances[row] >= bound):
            distances[row], nearest_ids[row] = _scan(
                queries[row], index.ids, num_found, index.vectors
            )
    return distances, nearest_ids


def _scan(
    query: Vectors, ids: Ids, num_found: int, vectors_of: VectorsOf
) -> tuple[Distances, Ids]:
    """Return the nearest examples of a query (p,) among all ``ids``, by brute force."""
    ids = np.sort(ids)
    parts = [ids[i : i + ROWS_AT_ONCE] for i in range(0, len(ids), ROWS_AT_ONCE)]
    distances = np.concatenate(
        [_squared_distances(query, vectors_of(part)) for part in parts]
    )
    nearest_distances, nearest_ids = _first(distances[None], ids[None], num_found)
    return nearest_distances[0], nearest_ids[0]


def _squared_distances(queries: Vectors, vectors: Vectors) -> Distances:
    """Return squared distances over the last axis, in float64; shapes broadcast."""
    difference = vectors.astype(np.float64)
    difference -= queries
    squares: Distances = np.einsum("...p,...p->...", difference, difference)
    return squares


def _first(distances: Distances, ids: Ids, count: int) -> tuple[Distances, Ids]:
    """Return the nearest ``count`` of each row; smaller ids first among equals."""
    order = np.lexsort((ids, distances))[:, :count]
    rows = np.arange(len(distances))[:, None]
    return distances[rows, order], ids[rows, order]


@dataclass(frozen=True)
class View:
    """An index and the contents of the same examples."""

    index: VectorIndex
    contents: Contents
    settings: IndexSettings
    version: Version  # of the embeddings
    read_vectors: VectorsOf  # from the database

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest examples; see `Store.search`."""
        query_rows = np.ascontiguousarray(queries.detach().numpy())
        num_found = min(num_neighbors, len(self.contents))
        if num_found == 0 or len(query_rows) == 0:
            empty = torch.empty((len(query_rows), num_found), dtype=torch.int64)
            return Neighbors(
                empty.double(), empty, empty, self.contents, self.version.fingerprint
            )
        distances, ids = nearest(
            query_rows, self.index, self.settings, num_found, self.read_vectors
        )
        labels = self.contents.labels[self.contents.positions(ids)]
        return Neighbors(
            torch.from_numpy(distances),
            torch.from_numpy(labels),
            torch.from_numpy(ids),
            self.contents,
            self.version.fingerprint,
        )

    def vectors(self, ids: Ids) -> Vectors:
        """Return stored embeddings (m, p) by id, as they were added."""
        if isinstance(self.index, FlatIndex):
            return self.index.vectors(ids)
        return self.read_vectors(ids)


def bring_up_to_date(
    index: VectorIndex, contents: Contents, read_vectors: VectorsOf
) -> int:
    """Give ``index`` the ids of ``contents``; return the number of changes."""
    removed = np.setdiff1d(index.ids, contents.ids)
    missing = np.setdiff1d(contents.ids, index.ids)
    if len(removed):
        index.remove(removed)
    if len(missing):
        index.add(missing, read_vectors(missing))
    return len(removed) + len(missing)


class LiveView:
    """The view that is searched; it follows the changes of the database."""

    def __init__(
        self, rows: Rows, cache: IndexCache | None, settings: IndexSettings
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._settings = settings
        # Held while the view is searched or changed. Searches of several threads wait
        # for each other: FAISS fills the memory bus, so together they are no faster.
        self._lock = rows.searching
        self._rebuilding = threading.Lock()
        self.num_unsaved = 0  # changes of the index since it was saved
        self._is_behind = False  # the database has changes that the view lacks
        self._is_torn = False  # a change of the view was interrupted: open it again
        with rows.reading():
            self._open()

    def _open(self) -> None:
        """Create the view of the current rows; called inside `Rows.reading`."""
        self.state = self._rows.state()
        contents = self._rows.contents()
        active = self.state.active
        index = None
        if self._cache is not None:
            index = self._cache.load(active, self._settings)
        if index is not None:
            changed = bring_up_to_date(index, contents, self._reader_of(active))
        if index is None or index.is_outgrown:
            index = self._build(active, contents.ids)
            changed = len(contents)
        self.num_unsaved = changed
        self.view = self._view(index, contents, active)

    @contextlib.contextmanager
    def snapshot(self, *, reads_rows: bool = False) -> Iterator[View]:
        """Yield the view of the newest state; it does not change during the block.

        With ``reads_rows``, what the block reads from the database is of that state as
        well. A flat index is searched without the database.
        """
        reads_rows |= not isinstance(self._settings, FlatSettings)
        with (
            self._lock,
            self._rows.reading() if reads_rows else contextlib.nullcontext(),
        ):
            has_changed = self._rows.has_changed()
            self._is_behind |= has_changed
            if self._is_behind or self._is_torn:
                with self._torn_if_interrupted():
                    self._catch_up()
                self._is_behind = False
                self._is_torn = False
            yield self.view
        if has_changed and self.view.index.is_outgrown:
            self._rebuild_for_reader()

    def vectors(self, ids: Ids) -> Vectors:
        """Return embeddings (m, p) by id, without a look at the newest state."""
        with self._lock:
            return self.view.vectors(ids)

    def refresh(self) -> None:
        """Apply the changes of another process to the view."""
        with self.snapshot():
            pass

    def _catch_up(self) -> None:
        with self._rows.reading():
            state = self._rows.state()
            known = self.view.contents
            if self._is_torn or state.active != self.state.active:
                self._open()
                return
            if state.num_removed == self.state.num_removed:
                removed = np.empty(0, np.int64)
                added = self._rows.contents(after=int(known.ids.max(initial=0)))
            else:
                current = self._rows.contents()
                removed = np.setdiff1d(known.ids, current.ids)
                added = current.take(np.isin(current.ids, known.ids, invert=True))
            vectors = self._reader_of(state.active)(added.ids)
        self._change(added, vectors, removed)
        self.state = state

    def _rebuild_for_reader(self) -> None:
        """Rebuild a reader's index; only the calling thread waits for it."""
        if not self._rebuilding.acquire(blocking=False):
            return
        try:
            # The writer may delete examples during the build; its next change starts
            # another attempt.
            with contextlib.suppress(ExamplesMissingError):
                version = self.view.version
                index = self.built(version)
                with self._lock:
                    if version == self.view.version:
                        contents = self.view.contents
                        bring_up_to_date(index, contents, self._reader_of(version))
                        self.view = self._view(index, contents, version)
        finally:
            self._rebuilding.release()

    @contextlib.contextmanager
    def _torn_if_interrupted(self) -> Iterator[None]:
        """Open the view again before the next search if the block fails."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            raise

    def apply(self, change: Change) -> None:
        """Commit a change to the database, then apply it to the view."""
        vectors = change.embeddings
        if vectors is None:
            vectors = np.empty((0, self.state.active.embedding_dim), np.float32)

        def follow_up() -> None:
            with self._torn_if_interrupted():
                self.state = self._rows.state()
                self._change(change.added, vectors, change.removed)

        try:
            self._rows.apply(change, follow_up)
        except BaseException:
            # The commit may have succeeded before a disk error or an interrupt.
            self._is_behind = True
            raise
        self.num_unsaved += len(change.added) + len(change.removed)

    def _change(self, added: Contents, vectors: Vectors, removed: Ids) -> None:
        """Remove and add examples of the view; called with the lock held."""
        index = self.view.index
        contents = self.view.contents
        if len(removed):
            index.remove(removed)
            contents = contents.without(removed)
        if len(added):
            index.add(added.ids, vectors)
            contents = contents.followed_by(added)
        self.view = replace(self.view, contents=contents)

    def rebuild(self) -> None:
        """Rebuild the index from the vectors; searches use the old index until then."""
        ids = self.view.contents.ids
        vectors = self.view.vectors(ids)
        index = self._settings.build(self.view.index.dim, ids, vectors)
        with self._lock:
            self.view = replace(self.view, index=index)

    def built(self, version: Version) -> VectorIndex:
        """Build an index of the examples that a version has embedded so far."""
        with self._rows.reading():
            ids = self._rows.contents().ids
            lacking = self._rows.without_vector(version.number, 0, len(ids))
            ids = np.setdiff1d(ids, lacking)
            vectors = self._rows.vectors(ids, version.number)
        return self._settings.build(version.embedding_dim, ids, vectors)

    def switch(self, version: Version, index: VectorIndex) -> None:
        """Make a complete version the active one, and search it with ``index``."""
        contents = self._rows.contents()
        if not index.forgets and len(np.setdiff1d(index.ids, contents.ids)):
            # It would keep the bytes of examples that were deleted since it was built.
            index = self._build(version, contents.ids)
        bring_up_to_date(index, contents, self._reader_of(version))

        def follow_up() -> None:
            self.state = self._rows.state()
            self.view = self._view(index, contents, version)

        with self._torn_if_interrupted():
            self._rows.activate(version.number, follow_up)
        self.save()

    def save(self) -> None:
        """Save the index."""
        if self._cache is not None:
            self._cache.save(self.view.index, self.state.active, self._settings)
        self.num_unsaved = 0

    def save_if_outdated(self) -> None:
        """Save the index if repeating the changes since the save would take long."""
        enough = max(SAVE_AFTER, SAVE_AFTER_SHARE * len(self.view.contents))
        if not self._settings.is_exhaustive and self.num_unsaved > enough:
            self.save()

    def forget(self) -> None:
        """Erase the bytes of removed examples, in the index and on disk."""
        self.num_unsaved = max(1, len(self.view.contents))
        if not self.view.index.forgets:
            self.rebuild()
        try:
            if self._cache is not None:
                self._cache.clear()
            self._rows.erase_removed()
        except (StoreError, OSError) as error:
            raise NotErasedError(
                "the examples are deleted, but their bytes are not erased yet: "
                f"{error}. Then run: knnper store rewrite"
            ) from error

    def _build(self, version: Version, ids: Ids) -> VectorIndex:
        vectors = self._rows.vectors(ids, version.number)
        return self._settings.build(version.embedding_dim, ids, vectors)

    def _view(self, index: VectorIndex, contents: Contents, version: Version) -> View:
        return View(index, contents, self._settings, version, self._reader_of(version))

    def _reader_of(self, version: Version) -> VectorsOf:
        return functools.partial(self._rows.vectors, version=version.number)
