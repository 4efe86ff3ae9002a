"""The view of a store, kept in line with its rows."""

import contextlib
import functools
import threading
from collections.abc import Iterator

import numpy as np

from datastore.contents import Contents, Ids
from datastore.core.cache import Cache
from datastore.core.rows import Change, Head, Rows, Version
from datastore.core.view import ReadVectors, View, bring_up_to_date
from datastore.errors import ExamplesMissingError, NotErasedError, StoreError
from datastore.index.base import VectorIndex
from datastore.index.catalogue import IndexSettings, build_index

SAVE_AFTER, SAVE_AFTER_SHARE = 1000, 0.25
"""An index is saved when so many examples, and this share of all, have changed: what
changed since is built again after a kill. A flat one is built as fast as it is read."""


class LiveView:
    """What is searched, and how it follows what becomes of the rows.

    Parameters
    ----------
    rows
        The truth.
    cache
        Where an index is looked for at first, and saved.
    settings
        Of the index.
    """

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
        """See what another process has changed.

        Whoever asks while another thread does this waits for it: otherwise it might
        find what was deleted before it asked.
        """
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
        return build_index(self._settings, version.embedding_dim, ids, vectors)

    def switch(self, version: Version, index: VectorIndex) -> None:
        """Search another version, which is complete, from now on, for good.

        Parameters
        ----------
        version
            Has an embedding of every example.
        index
            Of that version, at this or an earlier moment.
        """
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
        """Leave no trace of what was removed, in the index nor on disk.

        Raises
        ------
        NotErasedError
            If that cannot be done now.
        """
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
        return build_index(self._settings, version.embedding_dim, ids, vectors)

    def _view(self, index: VectorIndex, contents: Contents, version: Version) -> View:
        return View(index, contents, self._settings, version, self._reads(version))

    def _reads(self, version: Version) -> ReadVectors:
        return functools.partial(self._rows.vectors, version=version.number)
