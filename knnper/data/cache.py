"""The cache of decoded data sets: written once, then memory-mapped by every process."""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from knnper.data.examples import (
    TEXTS,
    Dataset,
    InputDtype,
    InputSpec,
    LabelledArrays,
    Vocabulary,
)
from knnper.data.normalization import channel_statistics, real_statistics
from knnper.data.numpy_files import RowFile, rows_in_parts
from knnper.errors import DataError
from knnper.files import UNFINISHED, FileLock, sync_to_disc
from knnper.reasons import Code, SafeReason

_LOG = logging.getLogger(__name__)
FORMAT_VERSION = 2
_ROWS_AT_ONCE = 1000
CentralSplit: TypeAlias = Literal["train", "test"]
CENTRAL_SPLITS: tuple[CentralSplit, ...] = ("train", "test")
_MANIFEST = "manifest.json"
_Integers: TypeAlias = Sequence[int] | NDArray[np.integer]
T = TypeVar("T")
Source: TypeAlias = Mapping[str, str | int | float | None]


@dataclass(frozen=True)
class DatasetContents:
    """Description of a data set, beside its arrays."""

    class_names: tuple[str, ...]  # by label
    coarse_of: tuple[int, ...] | None = None  # coarse label of each label
    dtype: InputDtype = "uint8"  # type of the inputs
    domain_names: tuple[str, ...] = ()  # by domain id; empty without domains
    vocabulary: Vocabulary | None = None  # of tokenised text
    client_names: tuple[str, ...] = ()  # by client id; empty if the data names none
    feature_names: tuple[str, ...] = ()  # in order; empty if the data names none
    num_skipped: int = 0  # unreadable images that were skipped


@dataclass(frozen=True, kw_only=True)
class Manifest(DatasetContents):
    """Content of ``manifest.json``; ``shapes`` names every array of the entry."""

    format_version: int
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shapes: dict[str, tuple[int, ...]]


class EntryWriter:
    """Writes the arrays of one cache entry into an empty folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, np.memmap[Any, Any]] = {}
        self._grown: dict[str, RowFile] = {}

    def new_images(
        self, split: CentralSplit, shape: tuple[int, ...], dtype: Any = np.uint8
    ) -> NDArray[Any]:
        """Create a zeroed array on disk, (n, height, width, channels), to decode into.

        Raises a `DataError` if n is 0 or the disk has too little free space.
        """
        if shape[0] == 0:
            raise DataError(f"found no {split} images, expected at least one")
        self._require_room(math.prod(shape) * np.dtype(dtype).itemsize)
        return self._new_array(f"{split}_images", shape, np.dtype(dtype))

    def put_images(self, split: CentralSplit, images: NDArray[Any]) -> None:
        """Store images of a stored type, shape (n, height, width, channels)."""
        self.new_images(split, images.shape, images.dtype)[...] = images

    def drop(self, split: CentralSplit, rows: Collection[int]) -> None:
        """Remove rows from all arrays of a split after they were written."""
        for name in [name for name in self._mapped if name.startswith(f"{split}_")]:
            old = self._mapped.pop(name)
            remaining = np.delete(np.arange(len(old)), list(rows))
            if not len(remaining):
                raise DataError(f"no {split} image can be read; fix or add some")
            self._file(name).unlink()
            new = self._new_array(name, (len(remaining), *old.shape[1:]), old.dtype)
            for start in range(0, len(remaining), _ROWS_AT_ONCE):
                some = slice(start, start + _ROWS_AT_ONCE)
                new[some] = old[remaining[some]]

    def put_labels(self, split: CentralSplit, labels: _Integers) -> None:
        """Store the labels of a split, one per image."""
        self._put_integers(f"{split}_labels", labels)

    def put_client_ids(self, split: CentralSplit, client_ids: _Integers) -> None:
        """Store the client id of each image of a split."""
        self._put_integers(f"{split}_client_ids", client_ids)

    def put_domain_ids(self, split: CentralSplit, domain_ids: _Integers) -> None:
        """Store the domain id of each image of a split."""
        self._put_integers(f"{split}_domain_ids", domain_ids)

    def append_of_client(
        self,
        split: CentralSplit,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        client_id: int,
    ) -> None:
        """Append images of one client to a split."""
        self._require_room(images.nbytes)
        owners = np.full(len(labels), client_id, np.int64)
        parts = (("images", images), ("labels", labels), ("client_ids", owners))
        for kind, rows in parts:
            name = f"{split}_{kind}"
            if name not in self._grown:
                file = self._file(name)
                self._grown[name] = RowFile(file, rows.shape[1:], rows.dtype)
            self._grown[name].append(rows)

    def seal(self, name: str, contents: DatasetContents) -> None:
        """Write the manifest and flush all files to disk."""
        for array in self._mapped.values():
            array.flush()
        shapes = {name: array.shape for name, array in self._mapped.items()}
        shapes |= {name: rows.finish() for name, rows in self._grown.items()}
        mean, std = tuple[float, ...](), tuple[float, ...]()
        if contents.dtype not in TEXTS:
            is_real = contents.dtype == "float32"
            statistics = real_statistics if is_real else channel_statistics
            mean, std = statistics(rows_in_parts(self._file("train_images")))
        manifest = Manifest(
            **asdict(contents),
            format_version=FORMAT_VERSION,
            name=name,
            mean=mean,
            std=std,
            shapes=shapes,
        )
        (self._folder / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        for file in self._folder.iterdir():
            sync_to_disc(file)
        sync_to_disc(self._folder)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _put_integers(self, name: str, values: _Integers) -> None:
        self._new_array(name, (len(values),), np.dtype(np.int64))[:] = values

    def _new_array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.memmap[Any, Any]:
        file = self._file(name)
        array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
        self._mapped[name] = array
        return array

    def _require_room(self, num_bytes: int) -> None:
        """Check free space: writing to a map on a full disk kills the process."""
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise DataError(
                f"the decoded images need {num_bytes / 1e6:.0f} MB, but only "
                f"{free / 1e6:.0f} MB are free under {self._folder.parent}; free space "
                "or point KNNPER_CACHE to another disk"
            )


def read_entry(folder: Path) -> Dataset:
    """Open the data set stored in ``folder``, its arrays memory-mapped read-only."""
    manifest = TypeAdapter(Manifest).validate_json((folder / _MANIFEST).read_bytes())

    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"format {manifest.format_version}, expected {FORMAT_VERSION}")
    arrays = {
        name: map_array(folder / f"{name}.npy", shape)
        for name, shape in manifest.shapes.items()
    }
    _, height, width, channels = arrays["train_images"].shape
    names = manifest.class_names
    return Dataset(
        name=manifest.name,
        train=_split_arrays("train", arrays),
        test=_split_arrays("test", arrays),
        spec=InputSpec(
            (height, width, channels),
            len(names),
            manifest.mean,
            manifest.std,
            manifest.dtype,
            manifest.vocabulary,
        ),
        class_names=names,
        coarse_of=manifest.coarse_of,
        feature_names=manifest.feature_names,
        domain_names=manifest.domain_names,
        client_names=manifest.client_names,
        num_skipped=manifest.num_skipped,
    )


def map_array(
    file: Path, shape: tuple[int, ...], mode: Literal["r", "c"] = "r"
) -> NDArray[Any]:
    """Memory-map an .npy file read-only (``r``) or copy-on-write (``c``)."""
    array: NDArray[Any] = np.load(file, mmap_mode=mode, allow_pickle=False)
    if array.shape != shape:
        raise ValueError(f"{file.stem}: expected shape {shape}, found {array.shape}")
    return array


def _split_arrays(
    split: CentralSplit, arrays: dict[str, NDArray[Any]]
) -> LabelledArrays:
    return LabelledArrays(
        images=arrays[f"{split}_images"],
        labels=arrays[f"{split}_labels"],
        client_ids=arrays.get(f"{split}_client_ids"),
        domain_ids=arrays.get(f"{split}_domain_ids"),
    )


def state_of_files(paths: Iterable[Path], root: Path) -> str:
    """Hash the paths of files relative to ``root``, their sizes and times of change."""
    digest = hashlib.sha256()
    for path in paths:
        line = f"{os.path.relpath(path, root)}\0none\n"
        # A missing file is reported when it is read. ValueError: a NUL in the path.
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            line = f"{line}{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read_if_sound(entry: Path, read: Callable[[Path], T]) -> T | None:
    """Return ``read(entry)``; None if the entry is missing or damaged."""
    if not entry.exists():
        return None
    try:
        return read(entry)
    except (OSError, ValueError, EOFError, KeyError) as error:
        _LOG.warning("%s is damaged (%s) and will be decoded again", entry, error)
        return None


def _make_entry(entry: Path, fill: Callable[[Path], None]) -> None:
    """Replace ``entry`` by a folder that ``fill`` has filled; requires the lock."""
    unfinished = entry.with_name(f"{entry.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        fill(unfinished)
        shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_to_disc(entry.parent)


def fill_once(
    entry: Path, lock: Path, read: Callable[[Path], T], fill: Callable[[Path], None]
) -> T:
    """Read a cache entry; fill it first, in one process at a time, if it is missing."""
    content = _read_if_sound(entry, read)
    if content is not None:
        return content
    with contextlib.ExitStack() as stack:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock, wait=True))
        except OSError as error:
            raise UnwritableCacheError(str(error)) from error
        content = _read_if_sound(entry, read)
        if content is not None:
            return content
        _make_entry(entry, fill)
        return read(entry)


class UnwritableCacheError(Exception):
    """Raised if the folder of the cache cannot be written."""


Build: TypeAlias = Callable[[EntryWriter], DatasetContents]


def cache_root() -> Path:
    """Return the folder of the cache: ``KNNPER_CACHE``, or that of the user."""
    chosen = os.environ.get("KNNPER_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "knnper"


def cached_dataset(name: str, source: Source, build: Build) -> Dataset:
    """Open a data set from the cache; on the first use, ``build`` writes its entry.

    ``source`` holds everything that determines the decoded data. Each different source
    has an entry of its own.
    """

    def fill(folder: Path) -> None:
        writer = EntryWriter(folder)
        writer.seal(name, build(writer))

    return cached(name, [FORMAT_VERSION, dict(source)], read_entry, fill)


def cached(
    name: str,
    source: object,
    read: Callable[[Path], T],
    fill: Callable[[Path], None],
    root: Path | None = None,
) -> T:
    """Read the entry of a source in the cache, or below ``root``.

    If there is none, ``fill`` writes it, in one process at a time. ``source`` is a JSON
    value; each different source has an entry of its own.
    """
    text = json.dumps(source, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    entry = (root or cache_root()) / f"{name}-{fingerprint}"
    try:
        return fill_once(entry, entry.with_name(f"{entry.name}.lock"), read, fill)
    except UnwritableCacheError as error:
        raise DataError(
            f"the data cache cannot be written ({error}); point KNNPER_CACHE to a "
            "writable folder",
            reason=SafeReason(Code.UNUSABLE_STATE),
        ) from error
