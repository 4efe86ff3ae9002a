"""The one who may change a client's memory."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from datastore.contents import Ids
from datastore.core.arriving import (
    addition,
    arriving,
    require_fitting,
    require_new_names,
)
from datastore.core.live_view import LiveView
from datastore.core.reembedding import Embed, OnProgress, VersionFiller
from datastore.core.rows import Change, Rows, Version
from datastore.errors import StoreError, StoreFullError
from datastore.examples import Added, NewExamples, Selection, StoreSpec
from datastore.policy.catalogue import POLICIES
from datastore.policy.deletion import forget
from datastore.settings import StoreSettings
from datastore.store_reader import StoreReader, require_model
from knnper.config.seeding import RandomKey

_LOG = logging.getLogger(__name__)


class Store(StoreReader):
    """A store that can be changed.

    Made by `datastore.folder` (on disk, one folder a client) or
    `datastore.memory.memory_store` (in memory), which differ in nothing but what is
    left when the process ends. What `add` and `delete` have done when they return is
    done for good. Searches, by other threads or processes, go on meanwhile.

    Parameters
    ----------
    rows, live, spec, settings, fingerprint, resources
        See `StoreReader`.
    """

    def __init__(
        self,
        rows: Rows,
        live: LiveView,
        spec: StoreSpec,
        settings: StoreSettings,
        *,
        fingerprint: str | None = None,
        resources: contextlib.ExitStack | None = None,
    ) -> None:
        super().__init__(
            rows, live, spec, settings, fingerprint=fingerprint, resources=resources
        )
        self._changing, self._embedding = threading.RLock(), threading.Lock()
        self._background: ThreadPoolExecutor | None = None
        self._stopping = threading.Event()

    def add(self, new: NewExamples, fingerprint: str | None = None) -> Added:
        """Store examples as the policy says: all that it says, or nothing.

        Parameters
        ----------
        new
            n examples, embedded by the model that the store was embedded by.
        fingerprint
            Of that model; by default that with which the store was opened.

        Raises
        ------
        DataError
            If they do not fit the store's `StoreSpec`, an embedding is not finite or
            an external id is taken.
        StoreMismatchError
            If another model embedded them.
        StoreFullError
            If they fit neither the capacity nor the disk.
        """
        with self._changing:
            self._live.refresh()
            require_model(self.fingerprint, fingerprint or self._expected_model)
            require_fitting(new, self.spec, self.embedding_dim)
            require_new_names(self._rows, new)
            stream = self._live.head.stream
            offered = arriving(new, stream.num_offered, self._live.view.contents)
            decision = POLICIES[self.settings.policy].decide(
                self._live.view.contents,
                offered,
                stream,
                self.capacity,
                RandomKey(self.settings.seed, ("store",)),
            )
            self._live.apply(
                addition(new, offered, decision, self._live.head.active.number)
            )
            self._tidy_up()
        return Added(np.where(decision.kept, offered.ids, -1), decision.evicted)

    def delete(self, selection: Selection) -> Ids:
        """Delete examples, and every trace of them; return their ids.

        They are never found again, and when this returns their bytes are in no file of
        the store: the database is written anew, which takes as long as copying it, so
        delete many examples at once.

        Raises
        ------
        ValueError
            If the selection describes all examples.
        NotErasedError
            If the disk is full, or a reader keeps an older state of the files: the
            examples are deleted, their bytes are erased when the store is opened or
            compacted, or something is deleted, next.
        """
        if selection == Selection():
            raise ValueError(
                "expected a selection of some examples, found one of all; to forget "
                "everything, remove the store's folder"
            )
        with self._changing:
            self._live.refresh()
            ids = self._rows.select(selection)
            if len(ids) == 0:
                if self._rows.is_erasing():
                    self._live.forget()
                return ids
            held = self._live.view.contents
            labels = held.labels[held.positions(ids)]
            stream = forget(self._live.head.stream, labels)
            self._live.apply(Change(stream=stream, removed=ids, must_erase=True))
            self._live.forget()
        return ids

    def reembed(
        self,
        embed: Embed,
        fingerprint: str,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        """Embed all raw inputs by another model, then search those embeddings.

        Until then the store is searched, and added to, as before. What is done is kept
        when the process is killed: the next call goes on from there. The set of
        embeddings before stays beside the new one, see `roll_back`; a set of any other
        model is dropped.

        Parameters
        ----------
        embed
            From raw inputs (m, ...) to representations, float32 of shape (m, p').
        fingerprint
            Of that model.
        on_progress
            Is told how many more examples are embedded.

        Raises
        ------
        StoreError
            If the store keeps no inputs, is closed meanwhile, or is being embedded
            anew already.
        StoreFullError
            If the budget does not hold all examples with embeddings of that size.
        DataError
            If an embedding is not finite.
        """
        self._require_inputs()
        if fingerprint == self.fingerprint:
            return
        with self._alone():
            filler = VersionFiller(self._rows, embed, fingerprint, self._stopping)
            version = filler.fill(on_progress)
            self._require_room(version)
            index = self._live.built(version)
            with self._changing:
                # What arrived since; few, so that nobody is held up for long.
                self._live.switch(filler.fill(on_progress), index)

    def reembed_in_background(self, embed: Embed, fingerprint: str) -> "Future[None]":
        """Begin `reembed` in a thread of its own; its errors are in the future."""
        with self._changing:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "reembed")
            return self._background.submit(self.reembed, embed, fingerprint)

    def roll_back(self) -> None:
        """Search the embeddings from before the last `reembed` again.

        Raises
        ------
        StoreError
            If there are none, or examples that arrived since lack theirs.
        """
        with self._alone(), self._changing:
            known = {version.number: version for version in self._rows.versions()}
            version = known.get(self._live.head.previous or 0)
            if version is None:
                raise StoreError(
                    "there is nothing to roll back to: the store was never embedded "
                    "anew"
                )
            if len(self._rows.without_vector(version.number, 0, 1)):
                raise StoreError(
                    "examples arrived after the store was embedded anew; the model "
                    f"{version.fingerprint} must embed them before the store goes back "
                    "to it: call reembed with that model"
                )
            self._require_room(version)
            self._live.switch(version, self._live.built(version))

    def save(self) -> None:
        """Save the index, so that the next opening need not build it."""
        with self._changing:
            self._live.save()

    def compact(self) -> None:
        """Give free space back to the disk, build the index anew, and save it."""
        with self._changing:
            self._live.forget()
            if self._live.view.index.forgets:
                self._live.view.rebuild()
            self._live.save()

    def close(self) -> None:
        """Save what is worth it and let others write; the store cannot be used."""
        self._stopping.set()
        if self._background is not None:
            self._background.shutdown()
        with self._changing, self._resources:
            self._live.save_if_changed()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a second set of embeddings from being made, or dropped, meanwhile."""
        if not self._embedding.acquire(blocking=False):
            raise StoreError(
                "the store is being embedded anew; wait for that to end, or close the "
                "store to stop it"
            )
        try:
            yield
        finally:
            self._embedding.release()

    def _require_room(self, version: Version) -> None:
        most = self.settings.most_examples(self.spec, version.embedding_dim)
        if most is not None and len(self) > most:
            raise StoreFullError(
                f"with embeddings of {version.embedding_dim} numbers the budget has "
                f"room for {most} examples, found {len(self)}. Raise budget_mb (knnper "
                "store configure) or delete some, then embed anew: what is embedded "
                "already is kept"
            )

    def _tidy_up(self) -> None:
        """Do what may follow an addition; that it cannot be done is no error of it."""
        try:
            if self._live.view.index.is_outgrown:
                self._live.view.rebuild()
            self._live.save_if_outdated()
            self._stay_within_budget()
        except StoreError as error:
            _LOG.warning("the store is not tidied up: %s", error)

    def _stay_within_budget(self) -> None:
        """Close the holes that evicted examples left, once they are too many."""
        budget = self.settings.budget_mb
        # A second set of embeddings is not counted, and does not go away by this.
        if budget is None or len(self._rows.versions()) > 1:
            return
        index_bytes = len(self) * self.settings.index_bytes(self.embedding_dim)
        if self._rows.num_bytes() + index_bytes > budget * 1e6:
            self._rows.compact()
