"""A client's memory: `Store`, on disk or in memory."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, overload
from uuid import uuid4

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from knnper.datastore.connection import (
    connect,
    database_damaged,
    open_reader,
    transaction,
)
from knnper.datastore.database import Change, Rows
from knnper.datastore.examples import (
    Added,
    Contents,
    ExamplesMissingError,
    Ids,
    Neighbors,
    NewExamples,
    Selection,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    StoreSpec,
    StreamState,
    require_embeddings,
    require_labels,
)
from knnper.datastore.journal import (
    ACKNOWLEDGED,
    Acknowledged,
    Witness,
    writer_lock,
)
from knnper.datastore.policy import StoreSettings, forget, policy_of, require_settings
from knnper.datastore.search import IndexCache, LiveView
from knnper.datastore.tables import StoreRow, Version, create_tables, require_tables
from knnper.errors import DataError
from knnper.files import require_plain, whole_folder, write_atomically
from knnper.seeding import RandomKey

LATEST_ARRIVAL = 253_402_300_800.0
"""The end of the year 9999, seconds since 1970: what a date can say."""


def _require_fitting(new: NewExamples, spec: StoreSpec, embedding_dim: int) -> None:
    """Refuse examples that are not what the store is made for."""
    require_embeddings("embeddings to add", new.embeddings, embedding_dim)
    require_labels(new.labels, len(new.embeddings), spec.num_classes)
    _require_inputs(new.inputs, spec, len(new))
    if new.arrivals is not None:
        require_arrivals(new.arrivals, len(new))


def require_arrivals(arrivals: Tensor, num_rows: int) -> None:
    """Refuse anything but seconds since 1970, float64 of shape (num_rows,)."""
    shape = tuple(arrivals.shape)
    if shape != (num_rows,) or arrivals.dtype != torch.float64:
        raise DataError(
            f"arrivals: expected float64 of shape ({num_rows},), seconds since 1970, "
            f"found {arrivals.dtype} of shape {shape}"
        )
    if not bool(torch.isfinite(arrivals).all()):
        raise DataError("arrivals: expected finite seconds, found NaN or infinity")
    strange = (arrivals < 0) | (arrivals >= LATEST_ARRIVAL)
    if bool(strange.any()):
        row = int(strange.nonzero()[0])
        raise DataError(
            "arrivals: expected seconds since 1970, up to the year 9999, found "
            f"{float(arrivals[row]):g} in row {row}; divide milliseconds by 1000"
        )


def _arriving(new: NewExamples, num_offered: int, stored: Contents) -> Contents:
    """Return ``new`` as a policy sees it."""
    # A clock that was set back must not make them the oldest.
    clock = max(time.time(), float(stored.arrivals.max(initial=0.0)))
    return Contents(
        np.arange(1, len(new) + 1, dtype=np.int64) + num_offered,
        new.labels.numpy(),
        np.full(len(new), clock) if new.arrivals is None else new.arrivals.numpy(),
    )


def _require_inputs(inputs: Tensor | None, spec: StoreSpec, num_rows: int) -> None:
    if spec.input is None:
        if inputs is not None:
            raise DataError(
                "inputs: found some, but the store was created to keep none; leave "
                "them out, or create a store whose spec gives their layout"
            )
        return
    expected = (num_rows, *spec.input.shape)
    if inputs is None:
        raise DataError(
            f"inputs: found none, expected {spec.input.dtype} of shape {expected}: the "
            "store keeps them, to embed them again by another model"
        )
    if tuple(inputs.shape) != expected or inputs.dtype != spec.input.torch_dtype:
        raise DataError(
            f"inputs: expected {spec.input.dtype} of shape {expected}, found "
            f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        )


def _require_names(rows: Rows, given: Sequence[str | None], num_rows: int) -> None:
    """Refuse names that cannot be stored, or twice: in the batch or with the stored."""
    if len(given) != num_rows:
        raise DataError(
            f"external ids: expected one, or None, for each of {num_rows} examples, "
            f"found {len(given)}"
        )
    names = [name for name in given if name is not None]
    occurs_twice = len(set(names)) < len(names)
    for name in names:
        # Half of a surrogate pair is no UTF-8.
        if not name or any(one == "\0" or "\ud800" <= one <= "\udfff" for one in name):
            raise DataError(
                f"external ids: found {name!r}, expected at least one character, each "
                "of which can be written as UTF-8, and no NUL"
            )
        if occurs_twice and names.count(name) > 1:
            raise DataError(
                f"external ids: found {name!r} twice among the examples to add, "
                "expected each once; nothing was added"
            )
    taken = rows.select(Selection(external_ids=tuple(names)))
    if len(taken):
        raise DataError(
            f"external ids: {rows.external_ids(taken[:1])[0]!r} is stored already (and "
            f"{len(taken) - 1} others of this batch), expected new ones; nothing was "
            "added. Leave them out, or delete the stored ones first"
        )


AT_ONCE = 256
"""Inputs that are embedded, and written, together."""
Embed = Callable[[Tensor], Tensor]
"""From raw inputs (m, ...) to representations, float32 of shape (m, p)."""
OnProgress = Callable[[int], None]
"""Is told how many more examples have an embedding."""


class ReembeddingStopped(StoreError):
    """The store was closed while it was embedded anew; what was done is kept."""


PAUSES_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Before a search is tried again; see `StoreReader.search`."""


class StoreReader:
    """n examples with their representations and labels, searched by distance.

    Any number of threads may use one object. What another process changes is seen by
    whatever is asked next. A store on disk belongs to the process that opened it: one
    that is forked from it gets a `StoreError`.
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
        self.spec, self.settings = spec, settings
        self._rows, self._live = rows, live
        self._expected_model = fingerprint
        self._resources = resources or contextlib.ExitStack()
        # Of a `Store`: one change, and one new set of embeddings, at a time.
        self._changing, self._embedding = threading.RLock(), threading.Lock()
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return len(self.contents())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_classes(self) -> int:
        """c, the number of labels."""
        return self.spec.num_classes

    @property
    def embedding_dim(self) -> int:
        """p, the size of a representation."""
        return self._live.state.active.embedding_dim

    @property
    def fingerprint(self) -> str:
        """Of the model that embedded what is searched."""
        return self._live.state.active.fingerprint

    @property
    def capacity(self) -> int | None:
        """The most examples that are stored; None if that is not bounded."""
        return self.settings.most_examples(self.spec, self.embedding_dim)

    def contents(self) -> Contents:
        """Return ids, labels and times of arrival of what is stored."""
        self._live.refresh()
        return self._live.view.contents

    def vectors(self, ids: Ids) -> Tensor:
        """Return the embeddings, float32 of shape (m, p), of stored ids (m,)."""
        with self._live.lock:
            return torch.from_numpy(self._live.view.vectors(ids))

    def inputs(self, ids: Ids) -> Tensor:
        """Return the raw inputs, shape (m, ...), of stored ids (m,)."""
        self._require_inputs()
        return torch.from_numpy(self._rows.inputs(ids))

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of stored ids (m,)."""
        return self._rows.external_ids(ids)

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""
        return self._rows.select(selection)

    def search(
        self, queries: Tensor, num_neighbors: int, fingerprint: str | None = None
    ) -> Neighbors:
        """Return the k nearest examples of each query, float32 (m, p), or all n.

        ``fingerprint`` is of the model that embedded the queries, by default that with
        which the store was opened. `StoreMismatchError` if another one embedded the
        store, or has embedded it anew meanwhile.
        """
        if num_neighbors < 1:
            raise ValueError(f"expected at least one neighbour, found {num_neighbors}")
        for pause_s in PAUSES_S:
            try:
                return self._search(queries, num_neighbors, fingerprint)
            except ExamplesMissingError:
                # Candidates that are compared by the database may have left it since.
                time.sleep(pause_s)
        return self._search(queries, num_neighbors, fingerprint)

    def _search(
        self, queries: Tensor, num_neighbors: int, fingerprint: str | None
    ) -> Neighbors:
        self._live.refresh()
        with self._live.lock:
            view = self._live.view
            require_model(view.version.fingerprint, fingerprint or self._expected_model)
            require_embeddings("queries", queries, view.version.embedding_dim)
            return view.search(queries, num_neighbors)

    def close(self) -> None:
        """Give back what the store holds; it cannot be used any more.

        In a process that was forked meanwhile nothing is done: the files, and the
        lock, belong to the process that opened them.
        """
        if not self._rows.is_inherited:
            self._resources.close()

    def _require_inputs(self) -> None:
        if self.spec.input is None:
            raise StoreError(
                "the store keeps no raw inputs: it was created without a layout for "
                "them. Create one with StoreSpec.input, and add the examples again"
            )


def require_model(stored: str, found: str | None) -> None:
    """Refuse a model (None is not asked about) that did not embed a store."""
    if found is not None and found != stored:
        raise StoreMismatchError(
            f"the store was embedded by the model {stored[:12]}, found the model "
            f"{found[:12]}; distances between the two mean nothing. Give the run the "
            "store was made with, or embed the store anew by the other one: knnper "
            "store reembed"
        )


_LOG = logging.getLogger(__name__)


class Store(StoreReader):
    """A store that can be changed.

    Made by `create_store` and `open_store` (on disk, one folder a client) or
    `memory_store` (in memory), which differ in nothing but what is left when the
    process ends. What `add` and `delete` have done when they return is done for good.
    Searches, by other threads or processes, go on meanwhile.
    """

    def add(self, new: NewExamples, fingerprint: str | None = None) -> Added:
        """Store examples as the policy says: all that it says, or nothing.

        ``fingerprint`` is of the model that embedded them, by default that with which
        the store was opened; it must be the one that embedded the store.

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
            _require_fitting(new, self.spec, self.embedding_dim)
            embeddings = new.embeddings.detach().numpy()
            if new.external_ids is not None:
                _require_names(self._rows, new.external_ids, len(new))
            head, stored = self._live.state, self._live.view.contents
            offered = _arriving(new, head.stream.num_offered, stored)
            decision = policy_of(self.settings.policy).decide(
                stored,
                offered,
                head.stream,
                self.capacity,
                RandomKey(self.settings.seed, ("store",)),
            )
            kept = decision.kept
            names = np.array(new.external_ids or [None] * len(new), dtype=object)
            change = Change(
                stream=decision.state,
                added=offered.take(kept),
                embeddings=embeddings[kept],
                version=head.active.number,
                inputs=None if new.inputs is None else new.inputs.numpy()[kept],
                external_ids=names[kept].tolist(),
                removed=decision.evicted,
            )
            self._live.apply(change)
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
                if self._rows.row().erasing:
                    self._live.forget()
                return ids
            held = self._live.view.contents
            labels = held.labels[held.positions(ids)]
            stream = forget(self._live.state.stream, labels)
            self._live.apply(Change(stream=stream, removed=ids, must_erase=True))
            self._live.forget()
        return ids

    def reembed(
        self, embed: Embed, fingerprint: str, on_progress: OnProgress = lambda _: None
    ) -> None:
        """Embed all raw inputs by another model, then search those embeddings.

        Until then the store is searched, and added to, as before. What is done is kept
        when the process is killed: the next call resumes there. The set of
        embeddings before stays beside the new one, see `roll_back`; a set of any other
        model is dropped.

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
            version = self._fill(embed, fingerprint, on_progress)
            self._require_room(version)
            index = self._live.built(version)
            with self._changing:
                # What arrived since; few, so that nobody is held up for long.
                version = self._fill(embed, fingerprint, on_progress)
                self._live.switch(version, index)

    def _fill(self, embed: Embed, fingerprint: str, on_progress: OnProgress) -> Version:
        """Embed by a model what has no embedding by it yet; return its version.

        What is there already is not done again: a process that was killed, or a
        version that is rolled back to, goes on where it was left.
        """
        known = {one.fingerprint: one for one in self._rows.versions()}
        version, after = known.get(fingerprint), 0
        while True:
            if self._stopping.is_set():
                raise ReembeddingStopped(
                    "the store was closed while it was embedded anew; start again to "
                    "go on from where it was left"
                )
            # At one moment: an example may leave between the two reads.
            with self._rows.reading():
                if version is None:
                    ids = self._rows.contents(after).ids[:AT_ONCE]
                else:
                    ids = self._rows.without_vector(version.number, after, AT_ONCE)
                inputs = torch.from_numpy(self._rows.inputs(ids))
            if version is not None and len(ids) == 0:
                return version
            vectors = embed(inputs)
            if len(ids):
                dim = None if version is None else version.embedding_dim
                require_embeddings("embeddings by the new model", vectors, dim)
            if version is None:
                dim = int(vectors.shape[1])
                version = self._rows.add_version(fingerprint, dim)
            if len(ids):
                self._rows.add_vectors(version.number, ids, vectors.detach().numpy())
                on_progress(len(ids))
                after = int(ids[-1])

    def roll_back(self) -> None:
        """Search the embeddings from before the last `reembed`, if all have one."""
        with self._alone(), self._changing:
            known = {version.number: version for version in self._rows.versions()}
            version = known.get(self._live.state.previous or 0)
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

    def serialized(self) -> bytes:
        """Return all that is stored, and what the policy remembers, as bytes.

        `restored_store` makes a store in memory of them, `write_store` one on disk.
        """
        return self._rows.serialized()

    def save(self) -> None:
        """Save the index, so that the next opening need not build it."""
        with self._changing:
            self._live.save()

    def compact(self) -> None:
        """Give free space back to the disk, build the index anew, and save it."""
        with self._changing:
            self._live.forget()
            if self._live.view.index.forgets:
                self._live.rebuild()
            self._live.save()

    def close(self) -> None:
        """Save what is worth it and let others write; the store cannot be used.

        In a process that was forked meanwhile nothing is done.
        """
        if self._rows.is_inherited:
            return
        self._stopping.set()
        # A thread that embeds anew ends after its batch.
        with self._embedding, self._changing, self._resources:
            if self._live.num_unsaved:
                self._live.save()

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
                "store rewrite --set) or delete some, then re-embed: finished "
                "embeddings are kept"
            )

    def _tidy_up(self) -> None:
        """Do what may follow an addition; that it cannot be done is no error of it."""
        budget = self.settings.budget_mb
        try:
            if self._live.view.index.is_outgrown:
                self._live.rebuild()
            self._live.save_if_outdated()
            # A second set of embeddings is not counted, and does not go away by this.
            if budget is not None and len(self._rows.versions()) == 1:
                index_bytes = len(self) * self.settings.index_bytes(self.embedding_dim)
                # Evicted examples leave holes, which are closed once they are too many.
                if self._rows.num_bytes() + index_bytes > budget * 1e6:
                    self._rows.compact()
        except StoreError as error:
            _LOG.warning("the store is not tidied up: %s", error)


DATABASE, INDEX, LOCK = "store.sqlite3", "index", "writer.lock"
_SPEC = TypeAdapter(StoreSpec)
_SETTINGS = TypeAdapter(StoreSettings)


@dataclass(frozen=True)
class Identity:
    """What a store was made for, as its database says."""

    store_id: str  # unlike any other store's
    created: float  # seconds since 1970 (UTC)
    spec: StoreSpec
    settings: StoreSettings


def create_store(
    folder: Path,
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings | None = None,
) -> Store:
    """Return a new, empty store in ``folder``, open to write.

    The folder must not exist, or be empty. ``fingerprint`` is of the model that embeds
    what is added, with ``embedding_dim`` numbers each.
    """
    row = _new_row(spec, embedding_dim, settings)
    with new_folder(folder) as draft:
        path = draft / DATABASE
        with (
            contextlib.closing(connect(path, writable=True)) as connection,
            transaction(connection, path, writing=True),
        ):
            create_tables(connection, row, fingerprint, embedding_dim)
        write_atomically(draft / ACKNOWLEDGED, Acknowledged.of(row).encoded())
    return open_store(folder, writable=True)


def new_folder(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """Return a block that fills a folder, which becomes ``folder`` if nothing fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(
            f"{folder} is not empty; expected a new folder for the store. Give another "
            "one, or open the store that is there"
        )
    return whole_folder(folder)


@overload
def open_store(folder: Path, *, fingerprint: str | None = None) -> StoreReader: ...


@overload
def open_store(
    folder: Path, *, writable: Literal[True], fingerprint: str | None = None
) -> Store: ...


def open_store(
    folder: Path, *, writable: bool = False, fingerprint: str | None = None
) -> StoreReader:
    """Return the store in ``folder``; ``writable`` to be changed, by one process.

    ``fingerprint`` is of the model that embeds the queries; None does not ask.

    Raises
    ------
    StoreError
        If there is no store.
    StoreBusyError
        If another process writes.
    StoreMismatchError
        If another model embedded the store.
    StoreDamagedError
        If the files are not what was written.
    """
    with contextlib.ExitStack() as held:
        identity, rows = held.enter_context(open_rows(folder, writable=writable))
        cache = IndexCache(folder / INDEX, rows)
        if writable:
            _tidy_up(rows, cache)
        live = LiveView(rows, cache, identity.settings.index)
        require_model(live.state.active.fingerprint, fingerprint)
        return (Store if writable else StoreReader)(
            rows,
            live,
            identity.spec,
            identity.settings,
            fingerprint=fingerprint,
            resources=held.pop_all(),
        )


@contextlib.contextmanager
def open_rows(
    folder: Path, *, writable: bool = False
) -> Iterator[tuple[Identity, Rows]]:
    """Yield what a store was made for, and its rows, without the index."""
    require_database(folder)
    path = folder / DATABASE
    with contextlib.ExitStack() as held:
        if writable:
            held.callback(writer_lock(folder / LOCK).release)
        identity = read_identity(folder)
        layout = identity.spec.input
        if writable:
            writer, witness = connect(path, writable=True), Witness(folder)
            held.callback(witness.close)
            reader = connect(path, writable=False)
            rows = Rows(path, layout, reader, writer, witness.write)
        else:
            rows = Rows(path, layout, connect(path, writable=False), None)
        held.callback(rows.close)
        yield identity, rows


def read_identity(folder: Path) -> Identity:
    """Read the specification and settings of the store in ``folder``."""
    require_database(folder)
    path = folder / DATABASE
    # Read before the database: a writer may acknowledge further changes meanwhile.
    acknowledged = Acknowledged.read(folder)
    with open_reader(path) as connection, transaction(connection, path, writing=False):
        require_tables(connection, path)
        row = StoreRow.read(connection, path)
    if row.store_id != acknowledged.store_id:
        raise database_damaged(path, "the files in its folder are of different stores")
    if row.num_changes < acknowledged.num_changes:
        raise database_damaged(
            path,
            f"found {row.num_changes} changes, expected the {acknowledged.num_changes} "
            "that were acknowledged; its log is damaged or missing",
        )
    return identity_of(row)


def identity_of(row: StoreRow) -> Identity:
    """Return what a store was made for, as its row says."""
    try:
        spec = _SPEC.validate_json(row.spec)
        settings = _SETTINGS.validate_json(row.settings)
    except ValidationError as error:
        raise StoreDamagedError(
            "the store's classes and settings cannot be read; open it with the "
            "version of this software that wrote it"
        ) from error
    if len(row.stream_state.num_seen) != spec.num_classes:
        raise StoreDamagedError(
            f"the store says that it has {spec.num_classes} classes, but has seen "
            f"examples of {len(row.stream_state.num_seen)}; restore it from a backup"
        )
    return Identity(row.store_id, row.created, spec, settings)


def require_database(folder: Path) -> None:
    """Refuse a folder without a store, or with what may lead out of it."""
    try:
        require_plain(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be opened: {error}") from error
    if not (folder / DATABASE).is_file():
        raise StoreError(
            f"{folder} holds no store: {DATABASE} is missing. Give the folder that was "
            "created for the client, or create a store in it"
        )


def configure_store(folder: Path, settings: StoreSettings) -> None:
    """Change the settings of a store; another index is built when it is opened next."""
    with open_rows(folder, writable=True) as (identity, rows):
        spec, dim = identity.spec, rows.state().active.embedding_dim
        require_settings(settings, spec, dim)
        most, num_stored = settings.most_examples(spec, dim), len(rows.contents())
        if most is not None and most < num_stored:
            raise StoreError(
                f"found room for {most} examples in the new settings, expected at "
                f"least the {num_stored} that are stored; delete some first"
            )
        with rows.writing() as (_, row):
            row.settings = _SETTINGS.dump_json(settings).decode()


def _tidy_up(rows: Rows, cache: IndexCache) -> None:
    """Finish what a writer that was killed had begun."""
    rows.recover()
    if rows.row().erasing:
        cache.clear()
        rows.erase_removed()
    cache.remove_leftovers()


def _new_row(
    spec: StoreSpec, embedding_dim: int, settings: StoreSettings | None
) -> StoreRow:
    settings = settings or StoreSettings()
    require_settings(settings, spec, embedding_dim)
    row = StoreRow(
        store_id=uuid4().hex,
        created=time.time(),
        spec=_SPEC.dump_json(spec).decode(),
        settings=_SETTINGS.dump_json(settings).decode(),
    )
    row.stream_state = StreamState.start(spec.num_classes)
    return row


UNNAMED = "unnamed"
"""Fingerprint of a model that nobody asks about: the store ends before the model."""


def memory_store(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: StoreSettings | None = None,
) -> Store:
    """Return a store in memory that holds these examples, as far as its policy keeps.

    ``embeddings`` are float32 of shape (n, p), ``labels`` int64 (n,) in [0, c).
    """
    require_embeddings("embeddings to store", embeddings)
    store = empty_memory_store(
        StoreSpec(num_classes), int(embeddings.shape[1]), UNNAMED, settings
    )
    store.add(NewExamples(embeddings, labels))
    return store


def restored_store(content: bytes) -> Store:
    """Return a store in memory, of what `Store.serialized` returned."""
    rows = Rows.restored(content, None)
    identity = identity_of(rows.row())
    if identity.spec.input is not None:
        rows = Rows.restored(content, identity.spec.input)
    live = LiveView(rows, None, identity.settings.index)
    return Store(rows, live, identity.spec, identity.settings)


def write_store(folder: Path, content: bytes) -> None:
    """Write a store to a new folder, of what `Store.serialized` returned."""
    row = Rows.restored(content, None).row()
    with new_folder(folder) as draft:
        write_atomically(draft / DATABASE, content)
        write_atomically(draft / ACKNOWLEDGED, Acknowledged.of(row).encoded())


def empty_memory_store(
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings | None = None,
) -> Store:
    """Return an empty store in memory; see `create_store`."""
    row = _new_row(spec, embedding_dim, settings)
    rows = Rows.in_memory(row, spec.input, fingerprint, embedding_dim)
    settings = settings or StoreSettings()
    live = LiveView(rows, None, settings.index)
    return Store(rows, live, spec, settings)
