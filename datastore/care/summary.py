"""What a store is, in figures."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastore.contents import Contents
from datastore.core.rows import Head, Version
from datastore.folder import INDEX, LOCK, Identity, open_rows
from datastore.settings import StoreSettings
from datastore.sqlite.writer_lock import lock_holder


@dataclass(frozen=True)
class Summary:
    """What `summarize` finds.

    Attributes
    ----------
    identity
        What the store was made for.
    num_by_label
        Stored examples of each label.
    capacity
        The most examples, of capacity and budget together; None is not bounded.
    example_bytes
        What the budget counts for one example.
    versions
        The sets of embeddings, oldest first.
    active, previous
        The numbers of what is searched, and of what can be rolled back to.
    arrivals
        The oldest and the newest, seconds since 1970 (UTC); None of an empty store.
    files
        The bytes of each file, by its path in the folder.
    index_bytes
        Of the saved index; 0 if none is saved.
    is_erasing
        Whether deleted examples may still have left bytes.
    writer
        Process id of who writes; None if nobody does.
    """

    identity: Identity
    num_by_label: tuple[int, ...]
    capacity: int | None
    example_bytes: float
    versions: tuple[Version, ...]
    active: int
    previous: int | None
    arrivals: tuple[float, float] | None
    files: dict[str, int]
    index_bytes: int
    is_erasing: bool
    writer: str | None

    @property
    def num_examples(self) -> int:
        """N, the stored examples."""
        return sum(self.num_by_label)

    @property
    def settings(self) -> StoreSettings:
        """Policy, capacity and index."""
        return self.identity.settings


def summarize(folder: Path) -> Summary:
    """Return what the store in ``folder`` is; another process may write meanwhile.

    Raises
    ------
    StoreError
        If there is no store, or it cannot be read.
    """
    with open_rows(folder) as (identity, rows), rows.reading():
        head, contents = rows.head(), rows.contents()
        versions, is_erasing = tuple(rows.versions()), rows.is_erasing()
    return _summary(folder, identity, head, contents, versions, is_erasing)


def _summary(
    folder: Path,
    identity: Identity,
    head: Head,
    contents: Contents,
    versions: tuple[Version, ...],
    is_erasing: bool,
) -> Summary:
    spec, settings, dim = identity.spec, identity.settings, head.active.embedding_dim
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Summary(
        identity,
        tuple(np.bincount(contents.labels, minlength=spec.num_classes).tolist()),
        settings.most_examples(spec, dim),
        settings.example_bytes(spec, dim),
        versions,
        head.active.number,
        head.previous,
        _ends(contents),
        files,
        sum(size for name, size in files.items() if name.startswith(f"{INDEX}/")),
        is_erasing,
        lock_holder(folder / LOCK),
    )


def _ends(contents: Contents) -> tuple[float, float] | None:
    if len(contents) == 0:
        return None
    return float(contents.arrivals.min()), float(contents.arrivals.max())


def num_to_embed(folder: Path, fingerprint: str) -> int:
    """Return how many examples have no embedding by the model ``fingerprint`` yet.

    Raises
    ------
    StoreError
        As `summarize`.
    """
    with open_rows(folder) as (_, rows), rows.reading():
        num_examples = len(rows.contents())
        known = {one.fingerprint: one.number for one in rows.versions()}
        if fingerprint not in known:
            return num_examples
        return len(rows.without_vector(known[fingerprint], 0, num_examples))
