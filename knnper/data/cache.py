"""Decode a data set once; afterwards every process memory-maps the result."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from knnper.data.examples import (
    Dataset,
    InputDtype,
    InputSpec,
    LabelledArrays,
    channel_statistics,
)
from knnper.errors import DataError
from knnper.files import alone, make_entry, read_if_sound, sync_to_disc

Array = NDArray[np.generic]


def load_arrays(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Return those arrays of an .npz file that are called like one of ``names``.

    Raises
    ------
    DataError
        If it is no .npz file, or damaged, or holds Python objects.
    """
    # Anything else would be taken for a single array, or for a pickle.
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} cannot be read as .npz: it is not an archive")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, "an archive") from error


def load_array(path: Path) -> Array:
    """Return the array in an .npy file.

    Raises
    ------
    DataError
        If it is damaged, or holds Python objects.
    """
    try:
        found: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, "an array") from error
    return found


def _unreadable(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} cannot be read as {path.suffix}: it is damaged, or not {what} of "
        "numbers or texts that NumPy saved"
    )


_BYTES_AT_ONCE = 16 * 1024**2


class RowFile:
    """A new .npy file that rows are added to; how many need not be known beforehand.

    Parameters
    ----------
    path
        Of the file, which is made.
    row_shape
        The shape of one row.
    dtype
        Of all rows.
    """

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


FORMAT_VERSION = 1

Split: TypeAlias = Literal["train", "test"]

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Contents:
    """What is known of a data set besides its arrays.

    Attributes
    ----------
    class_names
        One for each label.
    coarse_of
        The coarse label of each label, or None.
    dtype
        What the images are: pixels, or the ids of text.
    domain_names
        One for each domain, where there are any.
    """

    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None = None
    dtype: Literal["uint8", "token"] = "uint8"
    domain_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds; ``shapes`` names every array of the entry."""

    format_version: int
    name: str
    class_names: tuple[str, ...]
    coarse_of: tuple[int, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shapes: dict[str, tuple[int, ...]]
    dtype: InputDtype = "uint8"
    domain_names: tuple[str, ...] = ()


class EntryWriter:
    """Writes the arrays of one entry into a folder of its own.

    Parameters
    ----------
    folder
        An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays: dict[str, np.memmap[Any, Any]] = {}
        self._grown: dict[str, RowFile] = {}

    def new_images(
        self, split: Split, shape: tuple[int, int, int, int]
    ) -> NDArray[np.uint8]:
        """Return a zeroed array on disc to decode into.

        Parameters
        ----------
        shape
            (n, height, width, channels).

        Raises
        ------
        DataError
            If there are no images or not enough room on the disc.
        """
        if shape[0] == 0:
            raise DataError(f"there are no {split} images; at least one is needed")
        self._require_room(int(np.prod(shape)))
        return self._new_array(f"{split}_images", shape, np.dtype(np.uint8))

    def put_images(self, split: Split, images: NDArray[np.uint8]) -> None:
        """Store ``images``, uint8 of shape (n, height, width, channels)."""
        count, height, width, channels = images.shape
        self.new_images(split, (count, height, width, channels))[...] = images

    def put_labels(
        self, split: Split, labels: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store the n labels of a split."""
        self._put_integers(f"{split}_labels", labels)

    def put_client_ids(
        self, split: Split, client_ids: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store whom each of the n images of a split belongs to."""
        self._put_integers(f"{split}_client_ids", client_ids)

    def put_domain_ids(
        self, split: Split, domain_ids: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Store which domain each of the n images of a split is from."""
        self._put_integers(f"{split}_domain_ids", domain_ids)

    def append_of_client(
        self,
        split: Split,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        client_id: int,
    ) -> None:
        """Store some of a client's images after those that are there already.

        For data sets of which only a part is in memory at a time. A split is either
        appended to or put as a whole.

        Parameters
        ----------
        images
            uint8, shape (n, height, width, channels).
        labels
            Shape (n,).
        client_id
            Whom all of them belong to.

        Raises
        ------
        DataError
            If there is not enough room on the disc.
        """
        self._require_room(images.nbytes)
        self._append(f"{split}_images", images)
        self._append(f"{split}_labels", labels)
        self._append(f"{split}_client_ids", np.full(len(labels), client_id, np.int64))

    def seal(self, name: str, contents: Contents) -> None:
        """Write the manifest and see to it that everything is on the disc."""
        shapes = self._finish()
        mean, std = self._statistics(contents)
        manifest = Manifest(
            FORMAT_VERSION, name, **asdict(contents), mean=mean, std=std, shapes=shapes
        )
        (self._folder / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        for file in self._folder.iterdir():
            sync_to_disc(file)
        sync_to_disc(self._folder)

    def _statistics(
        self, contents: Contents
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if contents.dtype == "token":
            return (), ()
        return channel_statistics(rows_in_parts(self._file("train_images")))

    def _finish(self) -> dict[str, tuple[int, ...]]:
        """Bring all arrays into their files; return their shapes."""
        for array in self._arrays.values():
            array.flush()
        mapped = {name: array.shape for name, array in self._arrays.items()}
        return mapped | {name: rows.finish() for name, rows in self._grown.items()}

    def _append(self, name: str, rows: NDArray[Any]) -> None:
        if name not in self._grown:
            self._grown[name] = RowFile(self._file(name), rows.shape[1:], rows.dtype)
        self._grown[name].append(rows)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _put_integers(
        self, name: str, values: Sequence[int] | NDArray[np.integer]
    ) -> None:
        stored = self._new_array(name, (len(values),), np.dtype(np.int64))
        stored[:] = values

    def _new_array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.memmap[Any, Any]:
        file = self._file(name)
        array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
        self._arrays[name] = array
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
    """Return the data set stored in ``folder``, its arrays memory-mapped read-only.

    Raises
    ------
    FileNotFoundError
        If there is no entry.
    ValueError
        If the entry is damaged or of another format.
    """
    manifest = TypeAdapter(Manifest).validate_json((folder / _MANIFEST).read_bytes())
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"format {manifest.format_version}, expected {FORMAT_VERSION}")
    arrays = {name: _read_array(folder, name, manifest) for name in manifest.shapes}
    _, height, width, channels = arrays["train_images"].shape
    return Dataset(
        name=manifest.name,
        train=_labelled("train", arrays),
        test=_labelled("test", arrays),
        spec=InputSpec(
            image_shape=(height, width, channels),
            num_classes=len(manifest.class_names),
            mean=manifest.mean,
            std=manifest.std,
            dtype=manifest.dtype,
        ),
        class_names=manifest.class_names,
        coarse_of=manifest.coarse_of,
        domain_names=manifest.domain_names,
    )


def _read_array(folder: Path, name: str, manifest: Manifest) -> NDArray[Any]:
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    if array.shape != manifest.shapes[name]:
        raise ValueError(
            f"{name} has the shape {array.shape}, expected {manifest.shapes[name]}"
        )
    return array


def _labelled(split: Split, arrays: dict[str, NDArray[Any]]) -> LabelledArrays:
    return LabelledArrays(
        images=arrays[f"{split}_images"],
        labels=arrays[f"{split}_labels"],
        client_ids=arrays.get(f"{split}_client_ids"),
        domain_ids=arrays.get(f"{split}_domain_ids"),
    )


Source: TypeAlias = Mapping[str, str | int | float | None]

Build: TypeAlias = Callable[[EntryWriter], Contents]


def cache_root() -> Path:
    """Return the folder of all decoded data sets.

    ``KNNPER_CACHE``, or ``knnper`` in the user's cache folder (``XDG_CACHE_HOME``, or
    ``~/.cache``).
    """
    chosen = os.environ.get("KNNPER_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "knnper"


def cached_dataset(name: str, source: Source, build: Build) -> Dataset:
    """Return the data set from the cache, decoding it first where it is not there.

    Parameters
    ----------
    name
        The data set's name in the catalogue.
    source
        Everything that decides what is decoded; another source is another entry.
    build
        Writes the arrays and returns the rest. Called at most once at a time on one
        cache folder, whatever the number of processes.

    Raises
    ------
    DataError
        If the cache folder cannot be written, or whatever ``build`` raises.

    Notes
    -----
    An entry is made beside its final place and renamed when it is complete and on the
    disc, so a half-written one is never seen. A damaged one is replaced.
    """
    entry = cache_root() / f"{name}-{_fingerprint(source)}"
    found = read_if_sound(entry, read_entry)
    if found is not None:
        return found
    with _exclusive(entry):
        found = read_if_sound(entry, read_entry)
        if found is not None:
            return found
        make_entry(entry, lambda folder: _fill(folder, name, build))
        return read_entry(entry)


def _fingerprint(source: Source) -> str:
    text = json.dumps([FORMAT_VERSION, dict(source)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fill(folder: Path, name: str, build: Build) -> None:
    writer = EntryWriter(folder)
    writer.seal(name, build(writer))


@contextlib.contextmanager
def _exclusive(entry: Path) -> Iterator[None]:
    """Hold the entry's lock."""
    with contextlib.ExitStack() as stack:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(entry.with_name(f"{entry.name}.lock")))
        except OSError as error:
            raise DataError(
                f"the data cache cannot be written ({error}); point KNNPER_CACHE to a "
                "folder that can"
            ) from error
        yield
