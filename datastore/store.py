"""The store of a client's examples: `Store`, on disk or in memory.

A store on disk is a folder with the database (the truth), the saved index (a cache),
the number of acknowledged changes and the lock of the process that writes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, overload
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
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
)
from knnper.datastore.journal import (
    ACKNOWLEDGED,
    Acknowledged,
    AcknowledgedFile,
    writer_lock,
)
from knnper.datastore.new_examples import require_external_ids, require_new_examples
from knnper.datastore.policy import StoreSettings, forget, policy_of, require_settings
from knnper.datastore.search import IndexCache, LiveView
from knnper.datastore.tables import StoreRow, Version, create_tables, require_tables
from knnper.files import require_plain, whole_folder, write_atomically
from knnper.seeding import RandomKey

# Raw inputs that are embedded, and written, together.
AT_ONCE = 256
# Names of examples that are kept in memory, some megabytes.
MAX_NAMES = 100_000
# Fingerprint of the model of a store that ends before the model, so is not compared.
UNNAMED = "unnamed"
# Names in a store's folder: the database, the folder of the saved index, the lock.
DATABASE, INDEX, LOCK = "store.sqlite3", "index", "writer.lock"
_SPEC = TypeAdapter(StoreSpec)
_SETTINGS = TypeAdapter(StoreSettings)
_LOG = logging.getLogger(__name__)

# From raw inputs (m, ...) to representations, float32 of shape (m, p).
Embed = Callable[[Tensor], Tensor]
# Takes the number of examples that were embedded since the last call.
OnProgress = Callable[[int], None]


class ReembeddingStopped(StoreError):
    """The store was closed during a re-embedding; finished embeddings are kept."""


class StoreReader:
    """n examples with their representations and labels, searched by distance.

    Any number of threads may use one object. Each call sees the changes that another
    process has committed before it. A store on disk belongs to the process that opened
    it: one that is forked from it gets a `StoreError`.
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
        self.spec = spec
        self.settings = settings
        self._rows = rows
        self._live = live
        self._expected_model = fingerprint
        # The owner's names by id, as far as they were read. An id belongs to one
        # example for ever, so an entry never becomes wrong.
        self._names = dict[int, str | None]()
        self._resources = resources or contextlib.ExitStack()
        # Of a `Store`: one change, and one re-embedding, at a time.
        self._changing = threading.RLock()
        self._embedding = threading.Lock()
        self._stopping = threading.Event()  # set by `Store.close`

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
        """Fingerprint of the model whose embeddings are searched."""
        return self._live.state.active.fingerprint

    @property
    def capacity(self) -> int | None:
        """The largest number of stored examples; None without a bound."""
        return self.settings.most_examples(self.spec, self.embedding_dim)

    def contents(self) -> Contents:
        """Return ids, labels and times of arrival of the stored examples."""
        with self._live.snapshot() as view:
            return view.contents

    def vectors(self, ids: Ids) -> Tensor:
        """Return the embeddings, float32 of shape (m, p), of stored ids (m,)."""
        return torch.from_numpy(self._live.vectors(ids))

    def inputs(self, ids: Ids) -> Tensor:
        """Return the raw inputs, shape (m, ...), of stored ids (m,)."""
        self._require_inputs()
        return torch.from_numpy(self._rows.inputs(ids))

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of stored ids (m,)."""
        return self._rows.external_ids(ids)

    def select(self, selection: Selection) -> Ids:
        """Return the ids of the selected examples, ascending."""
        return self._rows.select(selection)

    def search(
        self,
        queries: Tensor,
        num_neighbors: int,
        fingerprint: str | None = None,
        *,
        with_names: bool = False,
    ) -> Neighbors:
        """Return the k nearest examples of each query, float32 (m, p), or all n.

        Everything in the result comes from one state of the store, which includes all
        changes before the call.

        Parameters
        ----------
        fingerprint
            Of the model that embedded the queries, by default the one given when the
            store was opened. `StoreMismatchError` if another model embedded the store,
            or has re-embedded it since.
        with_names
            Whether to read the names of the neighbours.
        """
        if num_neighbors < 1:
            raise ValueError(f"expected at least one neighbour, found {num_neighbors}")
        with self._live.snapshot(reads_rows=with_names) as view:
            require_model(view.version.fingerprint, fingerprint or self._expected_model)
            require_embeddings("queries", queries, view.version.embedding_dim)
            neighbors = view.search(queries, num_neighbors)
            if with_names:
                names = self._names_of(neighbors.ids.numpy())
                neighbors = replace(neighbors, names=names)
        return neighbors

    def _names_of(self, ids: Ids) -> list[list[str | None]]:
        """Return the names of stored ids (m, k), each read from the database once."""
        if len(self._names) > MAX_NAMES:
            self._names = {}
        # `Store.delete` of another thread may replace the dictionary.
        known = self._names
        rows = ids.tolist()
        unknown = {example for row in rows for example in row} - known.keys()
        if unknown:
            queried = np.array(sorted(unknown), np.int64)
            names = self._rows.external_ids(queried)
            known.update(zip(queried.tolist(), names, strict=True))
        return [[known[example] for example in row] for row in rows]

    def close(self) -> None:
        """Close the files; the store cannot be used any more.

        Does nothing in a process that was forked since: the files, and the lock, belong
        to the process that opened them.
        """
        if not self._rows.is_inherited:
            self._resources.close()

    def _require_inputs(self) -> None:
        if self.spec.input is None:
            raise StoreError(
                "the store keeps no raw inputs: it was created without a layout for "
                "them. Create one with StoreSpec.input, and add the examples again"
            )


def _number_arrivals(new: NewExamples, num_offered: int, stored: Contents) -> Contents:
    """Give new examples ids above all earlier ids, and a time of arrival."""
    # Not before the newest stored example: after a clock was set back, `fifo` would
    # evict the new examples first.
    now = max(time.time(), float(stored.arrivals.max(initial=0.0)))
    return Contents(
        np.arange(1, len(new) + 1, dtype=np.int64) + num_offered,
        new.labels.numpy(),
        np.full(len(new), now) if new.arrivals is None else new.arrivals.numpy(),
    )


def require_model(stored: str, fingerprint: str | None) -> None:
    """Reject a model that did not embed the store; None is accepted."""
    if fingerprint is not None and fingerprint != stored:
        raise StoreMismatchError(
            f"the store was embedded by the model {stored[:12]}, found the model "
            f"{fingerprint[:12]}; distances between their embeddings mean nothing. "
            "Give the run that the store was made with, or re-embed the store by the "
            "other model: knnper store reembed"
        )


class Store(StoreReader):
    """A store that can be changed.

    `create_store` and `open_store` open one on disk (one folder for each client),
    `memory_store` creates one in memory; both behave alike until the process ends.
    Changes by `add` and `delete` are on disk when they return. Other threads and
    processes can search during a change.
    """

    def add(self, new: NewExamples, fingerprint: str | None = None) -> Added:
        """Store the examples that the policy keeps, in one transaction.

        ``fingerprint`` is that of the model that embedded them, by default the one
        given when the store was opened; it must be the model that embedded the store.

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
            require_new_examples(new, self.spec, self.embedding_dim)
            embeddings = new.embeddings.detach().numpy()
            if new.external_ids is not None:
                require_external_ids(self._rows, new.external_ids, len(new))
            state = self._live.state
            stored = self._live.view.contents
            offered = _number_arrivals(new, state.stream.num_offered, stored)
            decision = policy_of(self.settings.policy).decide(
                stored=stored,
                arriving=offered,
                state=state.stream,
                capacity=self.capacity,
                key=RandomKey(self.settings.seed, ("store",)),
            )
            is_kept = decision.is_kept
            names = np.array(new.external_ids or [None] * len(new), dtype=object)
            change = Change(
                stream=decision.state,
                added=offered.take(is_kept),
                embeddings=embeddings[is_kept],
                version=state.active.number,
                inputs=None if new.inputs is None else new.inputs.numpy()[is_kept],
                external_ids=names[is_kept].tolist(),
                removed=decision.evicted,
            )
            self._live.apply(change)
            self._tidy_up()
        return Added(np.where(decision.is_kept, offered.ids, -1), decision.evicted)

    def delete(self, selection: Selection) -> Ids:
        """Delete the selected examples and erase their bytes; return their ids.

        When this returns, no file of the store holds their bytes. That rewrites the
        whole database, which takes as long as copying it, so delete many examples at
        once.

        Raises
        ------
        ValueError
            If the selection is empty, which would select all examples.
        NotErasedError
            If the disk is full, or another process reads an older state of the files.
            The examples are deleted; their bytes are erased by the next opening,
            compaction or deletion.
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
            stream = forget(self._live.state.stream, labels=labels)
            self._live.apply(Change(stream=stream, removed=ids, must_erase=True))
            self._names = {}
            self._live.forget()
        return ids

    def reembed(
        self, embed: Embed, fingerprint: str, on_progress: OnProgress = lambda _: None
    ) -> None:
        """Embed all raw inputs by another model, then search those embeddings.

        Until then the store can be searched and added to as before. After a kill the
        next call resumes with the examples that are left. The earlier embeddings are
        kept for `roll_back`; those of any other model are dropped.

        Raises
        ------
        StoreError
            If the store keeps no inputs, is closed during the call, or is being
            re-embedded by another call.
        StoreFullError
            If the budget has no room for all examples with embeddings of that size.
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
                # The few examples that arrived since; additions wait only for these.
                version = self._fill(embed, fingerprint, on_progress)
                self._live.switch(version, index)

    def _fill(self, embed: Embed, fingerprint: str, on_progress: OnProgress) -> Version:
        """Embed the examples that a model has not embedded yet; return its version."""
        known = {version.fingerprint: version for version in self._rows.versions()}
        version = known.get(fingerprint)
        after = 0  # the last id that this call embedded
        while True:
            if self._stopping.is_set():
                raise ReembeddingStopped(
                    "the store was closed while it was re-embedded; start again to "
                    "embed the examples that are left"
                )
            # One snapshot: an example may be deleted between the two reads.
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
                    "there is nothing to roll back to: the store was never re-embedded"
                )
            if len(self._rows.without_vector(version.number, 0, 1)):
                raise StoreError(
                    "examples arrived after the store was re-embedded; the model "
                    f"{version.fingerprint} must embed them before the store goes back "
                    "to it: call reembed with that model"
                )
            self._require_room(version)
            self._live.switch(version, self._live.built(version))

    @contextlib.contextmanager
    def unchanged(self, fingerprint: str | None = None) -> Iterator[Contents]:
        """Yield the stored examples; other threads cannot change them in the block.

        ``fingerprint`` must be that of the model that embedded the store.
        """
        with self._changing:
            self._live.refresh()
            require_model(self.fingerprint, fingerprint or self._expected_model)
            yield self._live.view.contents

    def charges(self, ids: Ids) -> NDArray[np.float64]:
        """Return the ρ that stored ids (m,), ascending, spent on private answers.

        It is NaN where the charges are damaged.
        """
        return self._rows.charges(ids)

    def charge(self, ids: Ids, spent: NDArray[np.float64]) -> None:
        """Replace the ρ of stored ids (m,); it is on disk when this returns.

        Call it in a block of `unchanged`, together with `charges`.
        """
        self._rows.charge(ids, spent)

    def serialized(self) -> bytes:
        """Return the whole store, with the state of its policy, as bytes.

        `restored_store` creates a store in memory from them, `write_store` one on disk.
        """
        return self._rows.serialized()

    def save(self) -> None:
        """Save the index, so that the next opening reads it instead of building it."""
        with self._changing:
            self._live.save()

    def compact(self) -> None:
        """Give free space back to the disk, rebuild the index, and save it."""
        with self._changing:
            self._live.forget()
            if self._live.view.index.forgets:
                self._live.rebuild()
            self._live.save()

    def close(self) -> None:
        """Save the index and release the lock; the store cannot be used any more.

        Does nothing in a process that was forked since.
        """
        if self._rows.is_inherited:
            return
        self._stopping.set()
        # A thread that re-embeds ends after its batch.
        with self._embedding, self._changing, self._resources:
            if self._live.num_unsaved:
                self._live.save()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Reject a second re-embedding or roll-back during the block."""
        if not self._embedding.acquire(blocking=False):
            raise StoreError(
                "the store is being re-embedded; wait for that to end, or close the "
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
        """Rebuild, save or compact after an addition, which succeeds in any case."""
        budget = self.settings.budget_mb
        try:
            if self._live.view.index.is_outgrown:
                self._live.rebuild()
            self._live.save_if_outdated()
            # A second set of embeddings does not count, and compacting keeps it.
            if budget is not None and len(self._rows.versions()) == 1:
                index_bytes = len(self) * self.settings.index_bytes(self.embedding_dim)
                # Evicted examples leave unused space, removed once it is too much.
                if self._rows.num_bytes() + index_bytes > budget * 1e6:
                    self._rows.compact()
        except StoreError as error:
            _LOG.warning("the store is not compacted: %s", error)


@dataclass(frozen=True)
class StoreIdentity:
    """The id, specification and settings of a store, from its database."""

    store_id: str  # different for each store
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
    """Create an empty store in ``folder`` and open it for writing.

    The folder must be empty or not exist. ``fingerprint`` is that of the model that
    will embed the examples, with ``embedding_dim`` numbers each.
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
    """Yield a draft that becomes ``folder`` after the block, unless the block fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(
            f"{folder} is not empty; expected a new folder for the store. Give another "
            "folder, or open the store in this one"
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
    """Open the store in ``folder``; only one process can open it as ``writable``.

    ``fingerprint`` is that of the model that embeds the queries; None is not checked.

    Raises
    ------
    StoreError
        If there is no store.
    StoreBusyError
        If another process has opened it for writing.
    StoreMismatchError
        If another model embedded the store.
    StoreDamagedError
        If the files are damaged.
    """
    with contextlib.ExitStack() as stack:
        identity, rows = stack.enter_context(open_rows(folder, writable=writable))
        cache = IndexCache(folder / INDEX, rows)
        if writable:
            _finish_interrupted(rows, cache)
        live = LiveView(rows, cache, identity.settings.index)
        require_model(live.state.active.fingerprint, fingerprint)
        return (Store if writable else StoreReader)(
            rows,
            live,
            identity.spec,
            identity.settings,
            fingerprint=fingerprint,
            resources=stack.pop_all(),
        )


@contextlib.contextmanager
def open_rows(
    folder: Path, *, writable: bool = False
) -> Iterator[tuple[StoreIdentity, Rows]]:
    """Open the database of a store without its index; yield identity and rows."""
    require_database(folder)
    path = folder / DATABASE
    with contextlib.ExitStack() as stack:
        if writable:
            stack.callback(writer_lock(folder / LOCK).release)
        identity = read_identity(folder)
        layout = identity.spec.input
        if writable:
            writer = connect(path, writable=True)
            acknowledgements = AcknowledgedFile(folder)
            stack.callback(acknowledgements.close)
            reader = connect(path, writable=False)
            rows = Rows(path, layout, reader, writer, acknowledgements.write)
        else:
            rows = Rows(path, layout, connect(path, writable=False), None)
        stack.callback(rows.close)
        yield identity, rows


def read_identity(folder: Path) -> StoreIdentity:
    """Read the specification and settings of the store in ``folder``."""
    require_database(folder)
    path = folder / DATABASE
    # Read before the database: a writer may add changes to both between the reads.
    acknowledged = Acknowledged.read(folder)
    with open_reader(path) as connection, transaction(connection, path, writing=False):
        require_tables(connection, path)
        row = StoreRow.read(connection, path)
    if row.store_id != acknowledged.store_id:
        raise database_damaged(
            path, "the files in its folder belong to different stores"
        )
    if row.num_changes < acknowledged.num_changes:
        raise database_damaged(
            path,
            f"found {row.num_changes} changes, expected the {acknowledged.num_changes} "
            "that were acknowledged; its log is damaged or missing",
        )
    return identity_of(row)


def identity_of(row: StoreRow) -> StoreIdentity:
    """Parse the specification and settings in a store's row."""
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
            f"the store has {spec.num_classes} classes, but its policy has counted "
            f"{len(row.stream_state.num_seen)}; restore it from a backup"
        )
    return StoreIdentity(row.store_id, row.created, spec, settings)


def require_database(folder: Path) -> None:
    """Reject a folder without a store, or a link that may lead elsewhere."""
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
    """Change the settings of a store; the next opening builds a changed index."""
    with open_rows(folder, writable=True) as (identity, rows):
        spec = identity.spec
        dim = rows.state().active.embedding_dim
        require_settings(settings, spec, dim)
        most = settings.most_examples(spec, dim)
        num_stored = len(rows.contents())
        if most is not None and most < num_stored:
            raise StoreError(
                f"found room for {most} examples in the new settings, expected at "
                f"least the {num_stored} that are stored; delete some first"
            )
        with rows.writing() as (_, row):
            row.settings = _SETTINGS.dump_json(settings).decode()


def _finish_interrupted(rows: Rows, cache: IndexCache) -> None:
    """Finish the writes, erasures and saves of a writer that was killed."""
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


def memory_store(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: StoreSettings | None = None,
) -> Store:
    """Create a store in memory with those of the examples that its policy keeps.

    ``embeddings`` are float32 of shape (n, p), ``labels`` int64 (n,) in [0, c).
    """
    require_embeddings("embeddings to store", embeddings)
    store = empty_memory_store(
        StoreSpec(num_classes), int(embeddings.shape[1]), UNNAMED, settings
    )
    store.add(NewExamples(embeddings, labels))
    return store


def restored_store(content: bytes) -> Store:
    """Create a store in memory from the bytes of `Store.serialized`."""
    rows = Rows.restored(content, None)
    identity = identity_of(rows.row())
    if identity.spec.input is not None:
        rows = Rows.restored(content, identity.spec.input)
    live = LiveView(rows, None, identity.settings.index)
    return Store(rows, live, identity.spec, identity.settings)


def write_store(folder: Path, content: bytes) -> None:
    """Write the bytes of `Store.serialized` to a new folder as a store."""
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
    """Create an empty store in memory; see `create_store`."""
    row = _new_row(spec, embedding_dim, settings)
    rows = Rows.in_memory(row, spec.input, fingerprint, embedding_dim)
    settings = settings or StoreSettings()
    live = LiveView(rows, None, settings.index)
    return Store(rows, live, spec, settings)
