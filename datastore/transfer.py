"""Import of examples into a store, export from it, and its summary."""

import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.class_folders import list_class_folders
from knnper.data.dividing import clean_name
from knnper.data.folders import no_folder_reason, unreachable_reason
from knnper.data.images import ImageShape, decode_all
from knnper.data.numpy_files import Array, load_array, load_arrays
from knnper.datastore.database import Rows
from knnper.datastore.examples import (
    Ids,
    NewExamples,
    Selection,
    StoreError,
    StoreFullError,
    require_labels,
)
from knnper.datastore.new_examples import require_arrivals
from knnper.datastore.store import (
    AT_ONCE,
    INDEX,
    LOCK,
    Embed,
    Store,
    StoreIdentity,
    open_rows,
)
from knnper.datastore.tables import ROWS_AT_ONCE, Version
from knnper.errors import DataError, warn_once
from knnper.files import lock_holder, sync_to_disc

_LOG = logging.getLogger(__name__)
# Arrays of an .npz file that are read.
NAMES = ("inputs", "labels", "external_ids", "arrivals", "class_names")
# The expected form of a source, in messages.
LAYOUT = "SOURCE/CLASS/IMAGE, or a file .npz with the arrays inputs and labels"


@dataclass(frozen=True)
class Source:
    """n examples with labels, and images that are read on demand."""

    labels: Tensor  # int64, shape (n,)
    external_ids: tuple[str | None, ...]  # names; None for an example without a name
    # From positions (m,) to uint8 of shape (m, height, width, channels).
    images: Callable[[Sequence[int]], Tensor]
    arrivals: Tensor | None = None  # seconds since 1970, float64 of shape (n,)
    num_ignored: int = 0  # files in the folders without the name of an image


def open_source(
    path: Path,
    image_shape: ImageShape,
    class_names: Sequence[str],
    num_classes: int | None = None,
) -> Source:
    """Open the examples in ``path``: a folder SOURCE/CLASS/IMAGE, or an .npz file.

    A file has ``inputs`` (uint8, (n, height, width, channels)), ``labels`` (n,) and
    optionally ``external_ids`` (n,) with empty texts for missing names, ``arrivals``
    (n,), and ``class_names``, which map its labels to those of the store.

    ``class_names`` are the store's: one for each label, or none. ``num_classes`` is by
    default their number.
    """
    if no_folder_reason(path) is None:
        source = _folder_source(path, image_shape, class_names)
    elif reason := unreachable_reason(str(path)):
        raise DataError(
            f"{path}: there is no such file or folder (it {reason}); give {LAYOUT}"
        )
    elif path.suffix == ".npz":
        count = len(class_names) if num_classes is None else num_classes
        source = _array_source(path, image_shape, class_names, count)
    else:
        raise DataError(
            f"{path}: found neither a folder nor a file .npz; give {LAYOUT}"
        )
    if len(source.external_ids) == 0:
        raise DataError(f"{path}: found no examples; give {LAYOUT}")
    return source


def read_inputs(path: Path, image_shape: ImageShape) -> NDArray[np.uint8]:
    """Read the raw inputs in a file, uint8 of shape (n, *image_shape)."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix == ".npz":
        inputs = _inputs(load_arrays(path, NAMES), path, image_shape)
    elif path.suffix == ".npy":
        array = load_array(path)
        rows = array[None] if array.shape == image_shape else array
        inputs = _inputs({"inputs": rows}, path, image_shape)
    else:
        return decode_all([path], image_shape).numpy()
    if len(inputs) == 0:
        raise DataError(f"{path}: found no inputs in it, expected at least one")
    return inputs


def _folder_source(
    root: Path, image_shape: ImageShape, class_names: Sequence[str]
) -> Source:
    """Open the images in ``root``, in an order that mixes the classes."""
    # Otherwise a policy that keeps the first or the last examples would keep those of
    # one class. The order depends on the paths alone.
    listing = list_class_folders(root)
    for warning in listing.warnings:
        warn_once(_LOG, warning)
    label_of = _label_of(listing.classes, class_names, f"{root} has folders of classes")
    labels = [label_of[name] for name in listing.class_of.values()]
    paths = [root / name for name in listing.class_of]
    return Source(
        torch.tensor(labels, dtype=torch.int64),
        tuple(listing.class_of),
        lambda positions: decode_all([paths[row] for row in positions], image_shape),
        num_ignored=listing.num_ignored,
    )


def _label_of(
    used: Iterable[str], class_names: Sequence[str], context: str
) -> dict[str, int]:
    """Map the names ``used`` to labels; differences in white space are ignored.

    ``context`` begins the message about unknown names.
    """
    number_of = {clean_name(name): label for label, name in enumerate(class_names)}
    number_of |= {name: label for label, name in enumerate(class_names)}
    label_of = {
        name: number_of.get(name, number_of.get(clean_name(name), -1)) for name in used
    }
    unknown = [name for name, label in label_of.items() if label < 0]
    if unknown:
        raise DataError(
            f"{context} that the store does not know: {', '.join(unknown)}; expected "
            f"some of {', '.join(class_names)}. Rename them, or leave them out"
        )
    return label_of


def _array_source(
    path: Path, image_shape: ImageShape, class_names: Sequence[str], num_classes: int
) -> Source:
    """Open the examples in an .npz file; see `open_source`."""
    arrays = load_arrays(path, NAMES)
    inputs = _inputs(arrays, path, image_shape)
    num_rows = len(inputs)
    texts = _column(arrays, "external_ids", "U", path, num_rows)
    names: list[str | None] = [None] * num_rows
    if texts is not None:
        names = [str(text) or None for text in texts]
    times = _column(arrays, "arrivals", "f", path, num_rows)
    arrivals = None if times is None else torch.from_numpy(times.astype(np.float64))
    labels = torch.from_numpy(_labels(arrays, path, num_rows, class_names))
    try:
        require_labels(labels, num_rows, num_classes)
        if arrivals is not None:
            require_arrivals(arrivals, num_rows)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    images = torch.from_numpy(inputs)
    return Source(labels, tuple(names), lambda at: images[list(at)], arrivals)


def _labels(
    arrays: Mapping[str, Array], path: Path, num_rows: int, class_names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the labels; class names in the file map them to the store's labels."""
    column = _column(arrays, "labels", "iu", path, num_rows)
    if column is None:
        raise DataError(f"{path}: found no labels; expected an array of whole numbers")
    labels = column.astype(np.int64)
    names = [str(name) for name in arrays.get("class_names", np.empty(0)).ravel()]
    if not names or not class_names:
        return labels
    if num_rows and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{path}: labels: expected values in [0, {len(names)}), the positions in "
            f"its class_names, found {labels.min()} to {labels.max()}"
        )
    used = [names[label] for label in np.unique(labels).tolist()]
    label_of = _label_of(
        used, class_names, f"{path} has, by its class_names, examples of classes"
    )
    return np.array([label_of.get(name, -1) for name in names], np.int64)[labels]


def _inputs(
    arrays: Mapping[str, Array], path: Path, shape: ImageShape
) -> NDArray[np.uint8]:
    if "inputs" not in arrays:
        raise DataError(
            f"{path}: found no inputs (an export of a store that keeps none has none); "
            "expected the arrays inputs and labels"
        )
    inputs = arrays["inputs"]
    if inputs.dtype != np.uint8 or inputs.shape[1:] != shape:
        raise DataError(
            f"{path}: inputs: expected uint8 of shape (n, {', '.join(map(str, shape))})"
            f", found {inputs.dtype} of shape {inputs.shape}"
        )
    return inputs.astype(np.uint8, copy=False)


def _column(
    arrays: Mapping[str, Array], name: str, kinds: str, path: Path, num_rows: int
) -> Array | None:
    """Return an array with a value for each input; None if the file has none."""
    column = arrays.get(name)
    if column is not None and (
        column.dtype.kind not in kinds or column.shape != (num_rows,)
    ):
        values = {"iu": "whole numbers", "U": "texts", "f": "seconds since 1970"}[kinds]
        raise DataError(
            f"{path}: {name}: expected {values} of shape ({num_rows},), found "
            f"{column.dtype} of shape {column.shape}"
        )
    return column


def export_store(folder: Path, target: Path, *, overwrite: bool = False) -> int:
    """Write all examples to the .npz file ``target``; return their number.

    The arrays are ``inputs`` (n, ...) if the store keeps them, ``labels`` (n,), ``ids``
    (n,), ``external_ids`` (n,) with empty texts for missing names, ``arrivals`` (n,) in
    seconds since 1970, ``embeddings`` (n, p) of the searched version, its
    ``fingerprint``, and ``class_names`` (c,). Reading them needs no pickle. The file is
    one snapshot of the store, and is written completely or not at all.
    """
    if target.exists() and not overwrite:
        raise StoreError(
            f"{target} exists already; expected a new file. Give another file, or "
            "--overwrite"
        )
    if not target.parent.is_dir():
        raise StoreError(
            f"{target} cannot be written: there is no folder {target.parent}; make it"
        )
    draft = target.with_name(f".{target.name}.{uuid4().hex}.draft")
    try:
        with open_rows(folder) as (identity, rows), draft.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive, rows.reading():
                num_examples = _fill(archive, rows, identity)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        sync_to_disc(target.parent)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return num_examples


def _fill(archive: zipfile.ZipFile, rows: Rows, identity: StoreIdentity) -> int:
    contents = rows.contents()
    active = rows.state().active
    spec = identity.spec
    ids = contents.ids
    if spec.input is not None:
        shape = (len(ids), *spec.input.shape)
        parts: Iterator[Array] = (rows.inputs(part) for part in _in_parts(ids))
        _put(archive, "inputs", shape, np.dtype(spec.input.dtype), parts)
    parts = (rows.vectors(part, active.number) for part in _in_parts(ids))
    shape = (len(ids), active.embedding_dim)
    _put(archive, "embeddings", shape, np.dtype(np.float32), parts)
    names = [name or "" for name in rows.external_ids(ids)]
    small = {
        "labels": contents.labels,
        "ids": ids,
        "external_ids": np.array(names, dtype=np.str_),
        "arrivals": contents.arrivals,
        "fingerprint": np.array(active.fingerprint),
        "class_names": np.array(spec.class_names, dtype=np.str_),
    }
    for name, array in small.items():
        _put(archive, name, array.shape, array.dtype, [array])
    return len(ids)


def _in_parts(ids: Ids) -> Iterator[Ids]:
    for start in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[start : start + ROWS_AT_ONCE]


def _put(
    archive: zipfile.ZipFile,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    parts: Iterable[Array],
) -> None:
    """Write an array part by part, so that it is never in memory as a whole."""
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part).tobytes())


@dataclass(frozen=True)
class Filled:
    """The numbers of examples of a source by their outcome; see `fill`.

    Attributes
    ----------
    num_offered
        Given to the store.
    num_stored
        Of these, in the store at the end.
    num_not_kept
        Of these, rejected or evicted by the policy.
    num_evicted
        Stored before, and evicted to make room.
    num_skipped
        Not given to the store, which has their names already.
    num_ignored
        Files that are no images.
    """

    num_offered: int
    num_stored: int
    num_not_kept: int
    num_evicted: int
    num_skipped: int
    num_ignored: int


def fill(
    store: Store,
    source: Source,
    embed: Embed,
    fingerprint: str,
    on_start: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Filled:
    """Embed and store the examples of ``source`` with names that are not stored yet.

    ``on_start`` gets the number of examples to embed, ``on_progress`` the number of
    each batch.
    """
    names = tuple(name for name in source.external_ids if name is not None)
    stored = set(store.external_ids(store.select(Selection(external_ids=names))))
    new = [
        position
        for position, name in enumerate(source.external_ids)
        if name is None or name not in stored
    ]
    before = len(store)
    capacity = store.capacity
    kept = set[int]()  # ids
    # Refused before a part of the source is stored.
    if (
        store.settings.policy == "concatenate"
        and capacity is not None
        and before + len(new) > capacity
    ):
        raise StoreFullError(
            f"the store holds {before} examples of at most {capacity}, and {len(new)} "
            "are to be added: none was; raise the capacity (knnper store rewrite "
            "--set), delete examples, add fewer, or choose a policy that makes room, "
            "such as 'fifo'"
        )
    on_start(len(new))
    for start in range(0, len(new), AT_ONCE):
        part = new[start : start + AT_ONCE]
        images = source.images(part)
        positions = torch.tensor(part)
        examples = NewExamples(
            embeddings=embed(images),
            labels=source.labels[positions],
            inputs=images if store.spec.input is not None else None,
            external_ids=tuple(source.external_ids[row] for row in part),
            arrivals=(None if source.arrivals is None else source.arrivals[positions]),
        )
        added = store.add(examples, fingerprint)
        kept.update(added.ids[added.ids >= 0].tolist())
        kept.difference_update(added.evicted.tolist())
        on_progress(len(part))
    return Filled(
        num_offered=len(new),
        num_stored=len(kept),
        num_not_kept=len(new) - len(kept),
        num_evicted=before + len(kept) - len(store),
        num_skipped=len(source.external_ids) - len(new),
        num_ignored=source.num_ignored,
    )


@dataclass(frozen=True)
class StoreSummary:
    """The settings, contents, models and files of a store."""

    identity: StoreIdentity
    num_by_label: tuple[int, ...]
    capacity: int | None  # most examples, of capacity and budget together
    example_bytes: float  # what the budget counts for one example
    versions: tuple[Version, ...]  # oldest first
    active: int  # number of the version that is searched
    previous: int | None  # number of the version that can be rolled back to
    arrivals: tuple[float, float] | None  # oldest and newest, seconds since 1970 (UTC)
    files: dict[str, int]  # bytes of each file, by its path in the folder
    index_bytes: int  # of the saved index; 0 if none is saved
    is_erasing: bool  # whether bytes of deleted examples may be in the files
    writer: str | None  # id of the process that writes

    @property
    def num_examples(self) -> int:
        """The number of stored examples."""
        return sum(self.num_by_label)

    @property
    def num_free(self) -> int | None:
        """The number of examples that can be added; None without a bound."""
        if self.capacity is None:
            return None
        return max(0, self.capacity - self.num_examples)


def summarize(folder: Path) -> StoreSummary:
    """Summarise the store in ``folder``, which another process may be changing."""
    with open_rows(folder) as (identity, rows), rows.reading():
        state = rows.state()
        contents = rows.contents()
        versions = tuple(rows.versions())
        is_erasing = bool(rows.row().erasing)
    spec = identity.spec
    settings = identity.settings
    dim = state.active.embedding_dim
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    counts = np.bincount(contents.labels, minlength=spec.num_classes)
    arrivals = None
    if len(contents):
        arrivals = (float(contents.arrivals.min()), float(contents.arrivals.max()))
    return StoreSummary(
        identity=identity,
        num_by_label=tuple(counts.tolist()),
        capacity=settings.most_examples(spec, dim),
        example_bytes=settings.example_bytes(spec, dim),
        versions=versions,
        active=state.active.number,
        previous=state.previous,
        arrivals=arrivals,
        files=files,
        index_bytes=sum(
            size for name, size in files.items() if name.startswith(f"{INDEX}/")
        ),
        is_erasing=is_erasing,
        writer=lock_holder(folder / LOCK),
    )


def num_to_embed(folder: Path, fingerprint: str) -> int:
    """Return the number of examples that the model has not embedded yet."""
    with open_rows(folder) as (_, rows), rows.reading():
        num_examples = len(rows.contents())
        numbers = {version.fingerprint: version.number for version in rows.versions()}
        if fingerprint not in numbers:
            return num_examples
        return len(rows.without_vector(numbers[fingerprint], 0, num_examples))
