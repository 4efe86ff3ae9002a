"""The cache of decoded data: made once, then memory-mapped by every process."""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import TypeAdapter

from knnper.data.examples import (
    TEXTS,
    Dataset,
    InputDtype,
    InputSpec,
    LabelledArrays,
    Vocabulary,
    channel_statistics,
    real_statistics,
)
from knnper.errors import DataError
from knnper.files import UNFINISHED, FileLock, make_entry, read_if_sound, sync_to_disc
from knnper.process import import_extra
from knnper.reasons import Code, SafeReason

Array = NDArray[np.generic]
_HEADERS: Mapping[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_DAMAGE = (
    *(OSError, ValueError, EOFError, KeyError, RuntimeError, TypeError, SyntaxError),
    *(MemoryError, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""What NumPy and zipfile raise on files that are damaged, encrypted or no arrays."""
_LARGE_BYTES, _LARGEST_RATIO = 2**30, 200
"""An archive that expands to more than a gigabyte and to 200 times its size is refused
as a decompression bomb; deflate reaches 1032 times on zeros alone."""


def load_arrays(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Return those arrays of an .npz file that are called like one of ``names``."""
    # Anything else would be taken for a single array, or for a pickle.
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path} cannot be read as .npz: it is not an archive",
            reason=SafeReason(Code.UNREADABLE_FILE),
        )
    try:
        _require_stated_sizes(path, names)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except _DAMAGE as error:
        raise _unreadable(path, "an archive") from error


def load_array(path: Path) -> Array:
    """Return the array in an .npy file; a `DataError` where it is damaged."""
    try:
        with path.open("rb") as file:
            _require_stated_size(file, path.stat().st_size)
        found: Array = np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise _unreadable(path, "an array") from error
    return found


def _require_stated_sizes(path: Path, names: Collection[str]) -> None:
    """Refuse arrays whose headers claim what is not there, before memory is taken."""
    with zipfile.ZipFile(path) as archive:
        members = [
            member
            for member in archive.infolist()
            if member.filename.removesuffix(".npy") in names
        ]
        for member in members:
            with archive.open(member) as file:
                _require_stated_size(file, member.file_size)
    num_bytes = sum(member.file_size for member in members)
    if num_bytes > max(_LARGE_BYTES, _LARGEST_RATIO * path.stat().st_size):
        raise DataError(
            f"{path} expands to {num_bytes / 1e9:.1f} GB, more than {_LARGEST_RATIO} "
            "times its size, and is not read; save its arrays with numpy.savez, "
            "without compression, if that is right"
        )


def _require_stated_size(file: IO[bytes], num_bytes: int) -> None:
    """Refuse an .npy file of ``num_bytes`` if its header claims another size."""
    shape, _, dtype = _HEADERS[npy.read_magic(file)](file)
    # A shape may be negative.
    stated = math.prod(shape) * dtype.itemsize if min(shape, default=0) >= 0 else -1
    if not dtype.hasobject and stated != num_bytes - file.tell():
        raise ValueError(
            f"expected {stated} bytes of an array of shape {shape}, found "
            f"{num_bytes - file.tell()}"
        )


def _unreadable(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} cannot be read as {path.suffix}: it is damaged, or not {what} of "
        "numbers or texts that NumPy saved",
        reason=SafeReason(Code.UNREADABLE_FILE),
    )


_BYTES_AT_ONCE = 16 * 1024**2
_ROWS_AT_ONCE = 1000


class RowFile:
    """A new .npy file that rows are added to; how many need not be known before."""

    def __init__(
        self, path: Path, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._path = path
        self._row_shape = row_shape
        self._dtype = dtype
        self._num_rows = 0
        path.touch(exist_ok=False)
        self._write_header()

    def append(self, rows: NDArray[Any]) -> None:
        """Add ``rows``, shape (n, *row_shape), to the end."""
        given = np.ascontiguousarray(rows, dtype=self._dtype)
        if given.shape[1:] != self._row_shape:
            raise ValueError(f"expected rows {self._row_shape}, found {given.shape}")
        with self._path.open("ab") as file:
            file.write(given.data)
        self._num_rows += len(given)

    def finish(self) -> tuple[int, ...]:
        """End the file, which can then be read, and return its shape."""
        # NumPy pads a header so that its length is the same whatever the first
        # dimension is: this one fits into the place of the one before.
        self._write_header()
        return (self._num_rows, *self._row_shape)

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_rows, *self._row_shape),
        }
        with self._path.open("r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)


def rows_in_parts(path: Path) -> Iterator[NDArray[Any]]:
    """Read an .npy file in C order, about 16 MB at a time, or a row if that is more."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        row_size = math.prod(shape[1:])
        at_once = max(1, _BYTES_AT_ONCE // max(1, row_size * dtype.itemsize))
        for start in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - start)
            yield np.fromfile(file, dtype, count * row_size).reshape(count, *shape[1:])


FORMAT_VERSION = 2
Split: TypeAlias = Literal["train", "test"]
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Contents:
    """What is known of a data set besides its arrays."""

    class_names: tuple[str, ...]  # one for each label
    coarse_of: tuple[int, ...] | None = None  # the coarse label of each label, or None
    dtype: InputDtype = "uint8"  # what the images are, as in `InputSpec`
    domain_names: tuple[str, ...] = ()  # one for each domain, where there are any
    vocabulary: Vocabulary | None = None  # of tokenised text
    client_names: tuple[str, ...] = ()  # by client id, where the data names clients
    feature_names: tuple[str, ...] = ()  # in order, where the data names features
    num_skipped: int = 0  # images that could not be read, and were left out


@dataclass(frozen=True, kw_only=True)
class Manifest(Contents):
    """What ``manifest.json`` holds; ``shapes`` names every array of the entry."""

    format_version: int
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shapes: dict[str, tuple[int, ...]]


_Integers: TypeAlias = Sequence[int] | NDArray[np.integer]


class EntryWriter:
    """Writes the arrays of one entry into an empty folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, np.memmap[Any, Any]] = {}
        self._grown: dict[str, RowFile] = {}

    def new_images(
        self, split: Split, shape: tuple[int, ...], dtype: Any = np.uint8
    ) -> NDArray[Any]:
        """Return a zeroed array on disc, (n, height, width, channels), to decode into.

        A `DataError` says that there are no images, or not enough room on the disc.
        """
        if shape[0] == 0:
            raise DataError(f"there are no {split} images; at least one is needed")
        self._require_room(math.prod(shape) * np.dtype(dtype).itemsize)
        return self._new_array(f"{split}_images", shape, np.dtype(dtype))

    def put_images(self, split: Split, images: NDArray[Any]) -> None:
        """Store ``images``, of a stored type, (n, height, width, channels)."""
        self.new_images(split, images.shape, images.dtype)[...] = images

    def drop(self, split: Split, rows: Collection[int]) -> None:
        """Remove rows from all arrays of a split, which are written already."""
        for name in [name for name in self._mapped if name.startswith(f"{split}_")]:
            old = self._mapped.pop(name)
            kept = np.delete(np.arange(len(old)), list(rows))
            if not len(kept):
                raise DataError(f"no {split} image can be read; mend or add some")
            self._file(name).unlink()
            new = self._new_array(name, (len(kept), *old.shape[1:]), old.dtype)
            for start in range(0, len(kept), _ROWS_AT_ONCE):
                some = slice(start, start + _ROWS_AT_ONCE)
                new[some] = old[kept[some]]

    def put_labels(self, split: Split, labels: _Integers) -> None:
        """Store the n labels of a split."""
        self._put_integers(f"{split}_labels", labels)

    def put_client_ids(self, split: Split, client_ids: _Integers) -> None:
        """Store whom each of the n images of a split belongs to."""
        self._put_integers(f"{split}_client_ids", client_ids)

    def put_domain_ids(self, split: Split, domain_ids: _Integers) -> None:
        """Store which domain each of the n images of a split is from."""
        self._put_integers(f"{split}_domain_ids", domain_ids)

    def append_of_client(
        self,
        split: Split,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        client_id: int,
    ) -> None:
        """Store some of a client's images after those that are there already."""
        self._require_room(images.nbytes)
        owners = np.full(len(labels), client_id, np.int64)
        parts = (("images", images), ("labels", labels), ("client_ids", owners))
        for what, rows in parts:
            name = f"{split}_{what}"
            if name not in self._grown:
                file = self._file(name)
                self._grown[name] = RowFile(file, rows.shape[1:], rows.dtype)
            self._grown[name].append(rows)

    def seal(self, name: str, contents: Contents) -> None:
        """Write the manifest and see to it that everything is on the disc."""
        for array in self._mapped.values():
            array.flush()
        shapes = {name: array.shape for name, array in self._mapped.items()}
        shapes |= {name: rows.finish() for name, rows in self._grown.items()}
        mean, std = tuple[float, ...](), tuple[float, ...]()
        if contents.dtype not in TEXTS:
            of = real_statistics if contents.dtype == "float32" else channel_statistics
            mean, std = of(rows_in_parts(self._file("train_images")))
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
        """Ask beforehand: writing to a mapped file on a full disc kills the process."""
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise DataError(
                f"the decoded images need {num_bytes / 1e6:.0f} MB, but only "
                f"{free / 1e6:.0f} MB are free under {self._folder.parent}; make room "
                "or point KNNPER_CACHE to another disc"
            )


def read_entry(folder: Path) -> Dataset:
    """Return the data set stored in ``folder``, its arrays memory-mapped read-only."""
    manifest = TypeAdapter(Manifest).validate_json((folder / _MANIFEST).read_bytes())

    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"format {manifest.format_version}, expected {FORMAT_VERSION}")
    arrays = {
        name: _mapped(folder / f"{name}.npy", shape)
        for name, shape in manifest.shapes.items()
    }
    _, height, width, channels = arrays["train_images"].shape
    names = manifest.class_names
    shape, described = (height, width, channels), (manifest.mean, manifest.std)
    return Dataset(
        name=manifest.name,
        train=_labelled("train", arrays),
        test=_labelled("test", arrays),
        spec=InputSpec(
            shape, len(names), *described, manifest.dtype, manifest.vocabulary
        ),
        class_names=names,
        coarse_of=manifest.coarse_of,
        feature_names=manifest.feature_names,
        domain_names=manifest.domain_names,
        client_names=manifest.client_names,
        num_skipped=manifest.num_skipped,
    )


def _mapped(
    file: Path, shape: tuple[int, ...], mode: Literal["r", "c"] = "r"
) -> NDArray[Any]:
    array: NDArray[Any] = np.load(file, mmap_mode=mode, allow_pickle=False)
    if array.shape != shape:
        raise ValueError(f"{file.stem}: expected shape {shape}, found {array.shape}")
    return array


def _labelled(split: Split, arrays: dict[str, NDArray[Any]]) -> LabelledArrays:
    return LabelledArrays(
        images=arrays[f"{split}_images"],
        labels=arrays[f"{split}_labels"],
        client_ids=arrays.get(f"{split}_client_ids"),
        domain_ids=arrays.get(f"{split}_domain_ids"),
    )


T = TypeVar("T")


def state_of_files(paths: Iterable[Path], root: Path) -> str:
    """Return a digest of all paths below ``root``, sizes and times of modification."""
    digest = hashlib.sha256()
    for path in paths:
        line = f"{os.path.relpath(path, root)}\0none\n"
        # Reading the file reports it; ValueError is for a NUL in its path.
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            line = f"{line}{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _cached(
    entry: Path, lock: Path, read: Callable[[Path], T], fill: Callable[[Path], None]
) -> T:
    """Return what ``read`` makes of an entry, which one process at a time fills."""
    found = read_if_sound(entry, read)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock, wait=True))
        except OSError as error:
            raise _NoCacheError(str(error)) from error
        found = read_if_sound(entry, read)
        if found is not None:
            return found
        make_entry(entry, fill)
        return read(entry)


class _NoCacheError(Exception):
    """Nothing can be written where the cache should be."""


Source: TypeAlias = Mapping[str, str | int | float | None]
Build: TypeAlias = Callable[[EntryWriter], Contents]


def cache_root() -> Path:
    """Return the folder of all decoded data sets: ``KNNPER_CACHE``, or the user's."""
    chosen = os.environ.get("KNNPER_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "knnper"


def download_folder(root: str | None) -> Path:
    """Return the absolute ``root``; without one, ``downloads`` in the cache."""
    return Path(root).expanduser().absolute() if root else cache_root() / "downloads"


def hub_folder(
    name: str, *, download: bool, extra: str, repo_type: str = "model"
) -> Path:
    """Return a local folder, or that of what the Hugging Face Hub calls ``name``.

    The latter is looked for in the Hub's cache on this machine, and is downloaded only
    where ``download`` says so. Files of weights are not.
    """
    folder = Path(name).expanduser().absolute()
    if folder.is_dir():
        return folder
    hub = import_extra("huggingface_hub", extra, f"{name!r}, which is no folder,")
    is_model = repo_type == "model"

    def kept(*, local: bool) -> Path:
        found = hub.snapshot_download(
            name,
            repo_type=repo_type,
            local_files_only=local,
            allow_patterns=["*.json", "*.txt", "*.model"] if is_model else None,
        )
        return Path(found)

    try:
        # What is there is taken as it is: all processes of a run read the same.
        with contextlib.suppress(OSError, ValueError):
            return kept(local=True)
        return kept(local=not download)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "" if download else ", or set data.download=true"
        raise DataError(
            f"{folder} is no folder, and {name!r} is not to be had from the Hugging "
            f"Face Hub or its cache ({reason}); give a local folder{wanted}",
            reason=SafeReason(Code.MISSING_FILE),
        ) from error


def cached_dataset(name: str, source: Source, build: Build) -> Dataset:
    """Return the data set from the cache, which ``build`` fills where it is not there.

    ``source`` is everything that decides what is decoded: another is another entry.
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
    """Return what ``read`` makes of an entry of the cache, or of ``root``.

    ``fill`` makes it, in one process at a time, where it is not there. Of each
    ``source``, a JSON value, there is one.
    """
    text = json.dumps(source, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    entry = (root or cache_root()) / f"{name}-{fingerprint}"
    try:
        return _cached(entry, entry.with_name(f"{entry.name}.lock"), read, fill)
    except _NoCacheError as error:
        raise DataError(
            f"the data cache cannot be written ({error}); point KNNPER_CACHE to a "
            "folder that can",
            reason=SafeReason(Code.UNUSABLE_STATE),
        ) from error


_LOG = logging.getLogger(__name__)
_MOST_FORMS = 3

# Longer than a tick of the clocks that file systems take their times from.
_TICK_NS = 50_000_000

Decoded: TypeAlias = tuple[NDArray[np.uint8], Mapping[int, str]]
"""Images (m, height, width, channels), and why others, by position, have none."""


class _UnreadableFilesError(Exception):
    """Some files cannot be decoded, so that no entry is made."""


def cached_images(
    folder: Path,
    paths: Sequence[str],
    form: Sequence[object],
    shape: tuple[int, ...],
    decode: Callable[[], Decoded],
) -> Decoded:
    """Return what ``decode`` makes of a site's files, from the cache where it is there.

    An entry in ``folder`` belongs to the path, size and times of *each* of the site's
    files, and to the ``form``: what else decides on the images. When a file is new,
    gone or another, all entries are removed; otherwise the three that were last used
    are kept. Images of which some cannot be read are not kept: the reason may lie
    outside of the files. What is returned can be written to without changing the entry.
    """
    listing, changed_ns = _state_of(paths)
    digest = hashlib.sha256(json.dumps(form).encode()).hexdigest()[:32]
    decoded: list[Decoded] = []

    def read(entry: Path) -> Decoded:
        images = _mapped(entry / "images.npy", shape, "c")
        if images.dtype != np.uint8:
            raise ValueError(f"expected uint8, found {images.dtype}")
        with contextlib.suppress(OSError):
            os.utime(entry)
        return images, {}

    def fill(entry: Path) -> None:
        _remove_unused(entry, listing)
        # Let time pass until another change would be told by another time.
        left = changed_ns + _TICK_NS - time.time_ns()
        if 0 < left <= _TICK_NS:
            time.sleep(left / 1e9)
        decoded.append(decode())
        images, unreadable = decoded[0]
        if unreadable:
            raise _UnreadableFilesError
        # Not into a map: on a full disc that would kill the process.
        np.save(entry / "images.npy", images)
        sync_to_disc(entry / "images.npy")
        sync_to_disc(entry)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        kept = _cached(folder / f"{listing}-{digest}", folder / "lock", read, fill)
        return decoded[0] if decoded else kept
    except _UnreadableFilesError:
        return decoded[0]
    except (OSError, _NoCacheError) as error:
        _LOG.warning("images are decoded without a cache: %s", error)
        return decoded[0] if decoded else decode()


def _state_of(paths: Sequence[str]) -> tuple[str, int]:
    """Return a digest of the state of all files, and when the last one changed."""
    digest, changed_ns = hashlib.sha256(), 0
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - 50,000 files
        except (OSError, ValueError):
            digest.update(f"{path}\0none\0".encode("utf-8", "surrogateescape"))
            continue
        # A file that was moved over another may have the same size and time of
        # modification, but was changed by the move.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        line = f"{path}\0{status.st_size}\0{times}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
        changed_ns = max(changed_ns, status.st_ctime_ns)
    return digest.hexdigest()[:32], changed_ns


def _remove_unused(new: Path, listing: str) -> None:
    """Remove what is of no use any more beside a new entry, and leave room for it."""
    entries = {one for one in new.parent.iterdir() if one.is_dir()} - {new}
    useful = [
        one
        for one in entries
        if one.name.startswith(listing) and not one.name.endswith(UNFINISHED)
    ]
    useful.sort(key=lambda one: one.stat().st_mtime_ns)
    for one in entries.difference(useful[-(_MOST_FORMS - 1) :]):
        shutil.rmtree(one, ignore_errors=True)
