"""A store's examples as one .npz file."""

import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Ids
from datastore.errors import StoreError
from datastore.examples import StoreSpec
from datastore.folder import open_rows
from datastore.sqlite.raw import ROWS_AT_ONCE
from datastore.sqlite.rows import SqliteRows
from knnper.durable_files import sync_folder

Array = NDArray[np.generic]


def export_store(folder: Path, target: Path, *, overwrite: bool = False) -> int:
    """Write all examples to the file ``target``; return how many.

    The arrays are ``inputs`` (n, ...) where the store keeps them, ``labels`` (n,),
    ``ids`` (n,), ``external_ids`` (n,) with an empty text where there is none,
    ``arrivals`` (n,) in seconds since 1970, ``embeddings`` (n, p) of the version that
    is searched, its ``fingerprint``, and ``class_names`` (c,). They are read without
    pickle. The file is there as a whole or not at all, and of one moment of the store.

    Parameters
    ----------
    folder
        Of the store.
    target
        Ends in .npz.
    overwrite
        Whether a file that is there may be replaced.

    Raises
    ------
    StoreError
        If the file is there, or cannot be written.
    """
    if target.exists() and not overwrite:
        raise StoreError(
            f"{target} is there already; expected a new file. Give another one, or "
            "--overwrite"
        )
    if not target.parent.is_dir():
        raise StoreError(
            f"{target} cannot be written: there is no folder {target.parent}; make it"
        )
    draft = target.with_name(f".{target.name}.{uuid4().hex}.draft")
    try:
        num_examples = _write(folder, draft)
        draft.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return num_examples


def _write(folder: Path, draft: Path) -> int:
    with open_rows(folder) as (identity, rows), draft.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive, rows.reading():
            num_examples = _fill(archive, rows, identity.spec)
        file.flush()
        os.fsync(file.fileno())
    return num_examples


def _fill(archive: zipfile.ZipFile, rows: SqliteRows, spec: StoreSpec) -> int:
    contents, active = rows.contents(), rows.head().active
    ids = contents.ids
    if spec.input is not None:
        shape, dtype = (len(ids), *spec.input.shape), np.dtype(spec.input.dtype)
        _put_parts(archive, "inputs", shape, dtype, map(rows.inputs, in_parts(ids)))
    _put_parts(
        archive,
        "embeddings",
        (len(ids), active.embedding_dim),
        np.dtype(np.float32),
        (rows.vectors(part, active.number) for part in in_parts(ids)),
    )
    small = {
        "labels": contents.labels,
        "ids": ids,
        "external_ids": _names(rows, ids),
        "arrivals": contents.arrivals,
        "fingerprint": np.array(active.fingerprint),
        "class_names": np.array(spec.class_names, dtype=np.str_),
    }
    for name, array in small.items():
        _put_parts(archive, name, array.shape, array.dtype, [array])
    return len(ids)


def in_parts(ids: Ids) -> Iterator[Ids]:
    """Yield ``ids`` (n,) in parts of `ROWS_AT_ONCE`."""
    for start in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[start : start + ROWS_AT_ONCE]


def _names(rows: SqliteRows, ids: Ids) -> Array:
    return np.array([name or "" for name in rows.external_ids(ids)], dtype=np.str_)


def _put_parts(
    archive: zipfile.ZipFile,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[np.generic],
    parts: Iterable[Array],
) -> None:
    """Write an array that is never in memory as a whole."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part).tobytes())
