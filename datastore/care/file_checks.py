"""Whether a store's files are its own, and the saved index that of its database."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datastore.care.finding import Finding
from datastore.core.cache import MANIFEST, IndexCache, file_sha256
from datastore.errors import StoreDamagedError, named
from datastore.folder import DATABASE, INDEX, LOCK, Identity
from datastore.index.base import VectorIndex
from datastore.index.catalogue import read_index
from datastore.sqlite.acknowledged import ACKNOWLEDGED
from datastore.sqlite.rows import SqliteRows

OWN = frozenset(
    (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", ACKNOWLEDGED, INDEX, LOCK)
)
OWN_OF_INDEX = (MANIFEST, f".{MANIFEST}.draft", "*.index")
"""Some may be of a save that was cut short; whoever writes next removes them."""


def is_own(folder: Path, path: Path) -> bool:
    """Return whether what lies at ``path`` in a store's folder is the store's."""
    parts = path.relative_to(folder).parts
    if parts[0] != INDEX or len(parts) == 1:
        return parts[0] in OWN and len(parts) == 1
    is_file = len(parts) == 2 and not path.is_dir()
    return is_file and any(path.match(pattern) for pattern in OWN_OF_INDEX)


def check_files(folder: Path) -> Iterator[Finding]:
    """Yield the files that are not the store's own."""
    inside = folder / INDEX
    found = [*folder.iterdir(), *(inside.iterdir() if inside.is_dir() else ())]
    for path in sorted(path for path in found if not is_own(folder, path)):
        yield Finding(f"{path} is not the store's", "move it elsewhere, or remove it")


def check_index(
    folder: Path, identity: Identity, rows: SqliteRows
) -> Iterator[Finding]:
    """Yield what is wrong with the saved index.

    None that is saved, or that of another model or of other settings, is no fault: it
    is built when the store is opened.

    Parameters
    ----------
    folder
        Of the store.
    identity
        What it was made for.
    rows
        Its examples, all of which are sound.
    """
    mend = f"knnper store compact {folder} builds it anew"
    for what in _index_faults(folder / INDEX, identity, rows):
        yield Finding(f"the saved index {what}", mend)


def _index_faults(folder: Path, identity: Identity, rows: SqliteRows) -> Iterator[str]:
    cache = IndexCache(folder, rows)
    try:
        manifest = cache.manifest()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield f"has a manifest that cannot be read: {error}"
        return
    file = folder / f"{manifest.get('token')}.index"
    if not file.is_file():
        return
    if file_sha256(file) != manifest.get("sha256"):
        yield "is not what was written"
        return
    with rows.reading():
        active = rows.head().active
        settings = identity.settings.index
        if cache.distrust(active, settings) is not None:
            return
        try:
            index = read_index(settings, file, active.embedding_dim)
        except StoreDamagedError as error:
            yield f"cannot be read: {error}"
            return
        yield from _content_faults(index, rows)


def _content_faults(index: VectorIndex, rows: SqliteRows) -> Iterator[str]:
    """Yield how an index contradicts the rows; it may lack some, or have old ones."""
    unknown = index.ids[index.ids > rows.head().stream.num_offered]
    if len(unknown):
        yield f"has examples that never were: {named(unknown.tolist())}"
    if not index.keeps_vectors:
        return
    ids = np.intersect1d(index.ids, rows.contents().ids)
    for part in np.array_split(ids, 1 + len(ids) // 1024):
        stored = rows.vectors(part, rows.head().active.number)
        differs = (index.vectors(part) != stored).any(axis=1)
        if differs.any():
            found = named(part[differs].tolist())
            yield f"has other embeddings than the database: {found}"
            return
