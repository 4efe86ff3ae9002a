"""Inputs that lie in memory as one array, and the forms that they can be brought to."""

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from knnper.data.cache import load_arrays
from knnper.data.dividing import SPLITS, FractionSettings, Split
from knnper.data.examples import KINDS_OF_INPUT, InputDtype, InputSpec
from knnper.data.images_base import (
    DECODER,
    ClassFolders,
    list_class_folders,
    mixed,
    open_image,
    read_image,
)
from knnper.data.site_data import SiteData, SiteTask, place_of
from knnper.data.tables import Columns, are_whole_numbers, read_table, row_names
from knnper.data.text import (
    CHARACTER_NAMES,
    PlaysSettings,
    encode,
    plain_text,
    read_files,
    target_positions,
    windows_before,
)
from knnper.errors import DataError, KnnPerError
from knnper.experiment import PositiveInt, Settings
from knnper.files import UNFINISHED, alone, make_entry, read_if_sound, sync_to_disc
from knnper.loading import alternatives


@dataclass(frozen=True, kw_only=True)
class SiteSettings(Settings):
    """What can be set for every kind of own data.

    Attributes
    ----------
    label_map
        From what this site calls a label to what the federation calls it, where the
        two differ.
    unknown_labels
        ``error`` refuses data with labels that the federation does not know, ``drop``
        leaves their examples out.
    fractions
        How the examples are split where the data does not say it.
    """

    label_map: dict[str, str] = field(default_factory=dict)
    unknown_labels: Literal["error", "drop"] = "error"
    fractions: FractionSettings = field(default_factory=FractionSettings)


@dataclass(frozen=True)
class InputForm:
    """What inputs look like by themselves: shape of one, and type."""

    shape: tuple[int, int, int]
    dtype: InputDtype


@dataclass(frozen=True, eq=False)
class ReadInputs:
    """Inputs in memory.

    Attributes
    ----------
    images
        Of the readable ones among those that were asked for, in order: shape
        (m, height, width, channels), of the task's type.
    unreadable
        Why, by position in the data, of the others.
    """

    images: Tensor
    unreadable: Mapping[int, str] = field(default_factory=dict)


class Inputs(Protocol):
    """Inputs that are read when labels and splits are known."""

    def form(self) -> InputForm:
        """Return what they look like, where no task says what they should."""

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """Return the inputs at ``positions`` as ``task`` wants them.

        Raises
        ------
        DataError
            If they cannot be brought to this form.
        """

    def kept_in(self, folder: Path) -> "Inputs":
        """Return these inputs, of which what takes long to read is kept in a folder.

        Inputs that are read quickly are returned as they are.
        """


@dataclass(frozen=True, eq=False)
class Collected:
    """n examples as the site has them.

    Attributes
    ----------
    source
        The file or folder; named in errors.
    names
        Of the examples, unique.
    labels
        What the site calls each example's label.
    inputs
        Of the examples.
    splits
        Of each example, or None where the data does not say it.
    given_splits
        Those that the data has, be they empty.
    numbered
        Whether labels are numbers that no class names belong to.
    num_ignored
        Files beside them that are no images by their names.
    """

    source: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    inputs: Inputs
    splits: tuple[Split, ...] | None = None
    given_splits: frozenset[Split] = frozenset()
    numbered: bool = False
    num_ignored: int = 0


_NUMBERS = "biuf"  # NumPy's letters for truth values, integers and floats

_LARGEST_PIXEL = 255


@dataclass(frozen=True, eq=False)
class ArrayInputs:
    """Inputs as one array.

    Attributes
    ----------
    source
        Named in errors.
    array
        Numbers, shape (n, ...).
    """

    source: str
    array: NDArray[Any]

    def form(self) -> InputForm:
        """See `Inputs`."""
        shape = _image_shape(self.array, self.source)
        is_image = self.array.dtype == np.uint8
        return InputForm(shape, "uint8" if is_image else "float32")

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `Inputs`."""
        chosen = self.array[np.asarray(positions, dtype=np.int64)]
        fitted = fit_inputs(chosen, task.spec, self.source)
        return ReadInputs(torch.from_numpy(fitted))

    def kept_in(self, folder: Path) -> "ArrayInputs":  # noqa: ARG002 - quick to read
        """See `Inputs`."""
        return self


def fit_inputs(array: NDArray[Any], spec: InputSpec, source: str) -> NDArray[Any]:
    """Return ``array`` in the form that ``spec`` asks for; itself where it has it.

    Parameters
    ----------
    array
        Numbers, shape (n, height, width, channels), without the channels where there
        is one, or (n, height * width * channels).

    Raises
    ------
    DataError
        If the shape is another one, or the values do not fit: whole numbers from 0 to
        255 for ``uint8``, to c - 1 for ``token``, finite ones for ``float32``.
    """
    height, width, channels = spec.image_shape
    shapes = {(height, width, channels), (math.prod(spec.image_shape),)}
    if channels == 1:
        shapes.add((height, width))
    if array.dtype.kind not in _NUMBERS or array.shape[1:] not in shapes:
        raise DataError(
            f"{source}: found inputs {array.dtype} of shape {_shown(array.shape)}, "
            f"expected {spec.dtype} of shape {_shown(('n', *spec.image_shape))}, "
            "as the federation agreed"
        )
    shaped = array.reshape(len(array), *spec.image_shape)
    if spec.dtype == "float32":
        return _reals(shaped, source)
    largest = _LARGEST_PIXEL if spec.dtype == "uint8" else spec.num_classes - 1
    if array.dtype != np.uint8 or largest < _LARGEST_PIXEL:
        _require_whole(shaped, largest, KINDS_OF_INPUT[spec.dtype], source)
    return shaped.astype(np.uint8, copy=False)


def _require_whole(array: NDArray[Any], largest: int, kind: str, source: str) -> None:
    with np.errstate(invalid="ignore"):
        wrong = ~((array >= 0) & (array <= largest) & (array % 1 == 0))
    if wrong.any():
        raise DataError(
            f"{source}: found {int(wrong.sum())} values in the inputs such as "
            f"{array[wrong][0]}, expected whole numbers from 0 to {largest}: the "
            f"federation agreed on {kind}"
        )


def _reals(array: NDArray[Any], source: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        reals = array.astype(np.float32, copy=False)
    wrong = int((~np.isfinite(reals)).sum())
    if wrong:
        raise DataError(
            f"{source}: {wrong} values in the inputs are missing, infinite or too "
            "large for float32; fill them in, or leave their examples out"
        )
    return reals


def _image_shape(array: NDArray[Any], source: str) -> tuple[int, int, int]:
    """Return (height, width, channels), as the number of dimensions suggests."""
    shape = tuple(array.shape[1:])
    if len(shape) == 1:
        return 1, 1, shape[0]
    if len(shape) == 2:
        return *shape, 1
    if len(shape) == 3:
        return shape
    raise DataError(
        f"{source}: found inputs of shape {_shown(array.shape)}, expected (n, height, "
        "width, channels), (n, height, width) or (n, features)"
    )


def _shown(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"


Arrays = Mapping[str, NDArray[Any]]

PER_SPLIT = tuple(
    f"{split}_{what}" for split in SPLITS for what in ("inputs", "labels", "names")
)

WHOLE = ("inputs", "labels", "names", "split")

CLASS_NAMES = "class_names"

KEYS = (*WHOLE, *PER_SPLIT, CLASS_NAMES)

_LAYOUT = (
    "expected inputs and labels, or train_inputs and train_labels and the same of "
    "validation and test"
)


def collect_arrays(arrays: Arrays, source: str) -> Collected:
    """Return the examples in ``arrays``.

    Parameters
    ----------
    arrays
        Either ``inputs`` (n, ...) and ``labels`` (n,), optionally ``names`` (n,) and
        ``split`` (n,) with the texts train, validation and test; or ``train_inputs``,
        ``train_labels``, optionally ``train_names``, and the same of validation and
        test. Labels are names of classes, or whole numbers: positions in
        ``class_names``, where this is there.
    source
        Named in errors.

    Raises
    ------
    DataError
        If arrays are missing, or of other lengths or types than they should be.
    """
    if any(key in arrays for key in PER_SPLIT):
        parts = [_part(arrays, split, source) for split in _given(arrays, source)]
        return _joined(parts, arrays, source)
    return _whole(arrays, source)


def _whole(arrays: Arrays, source: str) -> Collected:
    inputs, labels = _pair(arrays, "", source)
    names = _names(arrays, "names", len(inputs), "", source)
    splits = None
    if "split" in arrays:
        splits = split_texts(_texts(arrays, "split", len(inputs), source), source)
    texts, numbered = _label_texts(labels, arrays.get(CLASS_NAMES), source)
    return Collected(
        source=source,
        names=names,
        labels=texts,
        inputs=ArrayInputs(source, inputs),
        splits=splits,
        given_splits=frozenset(splits or ()),
        numbered=numbered,
    )


def _given(arrays: Arrays, source: str) -> list[Split]:
    """Return the splits that there are; train must be among them."""
    both = [key for key in WHOLE if key in arrays]
    if both or "train_inputs" not in arrays:
        found = ", ".join(sorted(arrays))
        raise DataError(f"{source}: found the arrays {found}; {_LAYOUT}")
    return [split for split in SPLITS if _has(arrays, split)]


def _has(arrays: Arrays, split: Split) -> bool:
    return any(f"{split}_{what}" in arrays for what in ("inputs", "labels"))


_Part = tuple[Split, NDArray[Any], NDArray[Any], tuple[str, ...]]


def _part(arrays: Arrays, split: Split, source: str) -> _Part:
    inputs, labels = _pair(arrays, f"{split}_", source)
    names = _names(arrays, f"{split}_names", len(inputs), f"{split}/", source)
    return split, inputs, labels, names


def _joined(parts: Sequence[_Part], arrays: Arrays, source: str) -> Collected:
    forms = {(inputs.shape[1:], inputs.dtype) for _, inputs, _, _ in parts}
    if len(forms) > 1:
        found = ", ".join(f"{s}: {i.dtype} {i.shape}" for s, i, _, _ in parts)
        raise DataError(
            f"{source}: the inputs of the splits differ in form ({found}); expected "
            "the same shape but for the number, and the same type"
        )
    labels = np.concatenate([labels for _, _, labels, _ in parts])
    texts, numbered = _label_texts(labels, arrays.get(CLASS_NAMES), source)
    return Collected(
        source=source,
        names=tuple(name for *_, names in parts for name in names),
        labels=texts,
        inputs=ArrayInputs(source, np.concatenate([inputs for _, inputs, *_ in parts])),
        splits=tuple(split for split, inputs, *_ in parts for _ in inputs),
        given_splits=frozenset(split for split, *_ in parts),
        numbered=numbered,
    )


def _pair(
    arrays: Arrays, prefix: str, source: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and labels, one label for each input."""
    for what in ("inputs", "labels"):
        if f"{prefix}{what}" not in arrays:
            raise DataError(f"{source}: found no array {prefix}{what}; {_LAYOUT}")
    inputs, labels = arrays[f"{prefix}inputs"], arrays[f"{prefix}labels"]
    if inputs.ndim < 2 or labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{source}: found {prefix}inputs of shape {inputs.shape} and "
            f"{prefix}labels of shape {labels.shape}; expected (n, ...) and (n,)"
        )
    return inputs, labels


def _label_texts(
    labels: NDArray[Any], class_names: NDArray[Any] | None, source: str
) -> tuple[tuple[str, ...], bool]:
    """Return the labels as texts, and whether they are numbers without names."""
    if labels.dtype.kind == "U":
        return tuple(labels.tolist()), False
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{source}: found labels of {labels.dtype}, expected whole numbers, or the "
            "names of classes as texts"
        )
    if class_names is None or not class_names.size:
        return tuple(map(str, labels.tolist())), True
    names = [str(name) for name in class_names.ravel()]
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{source}: labels: expected values in [0, {len(names)}), the positions in "
            f"its class_names, found {labels.min()} to {labels.max()}"
        )
    return tuple(names[label] for label in labels.tolist()), False


def _names(
    arrays: Arrays, key: str, num_rows: int, prefix: str, source: str
) -> tuple[str, ...]:
    if key not in arrays:
        return tuple(f"{prefix}{row:05d}" for row in range(num_rows))
    return _texts(arrays, key, num_rows, source)


def _texts(arrays: Arrays, key: str, num_rows: int, source: str) -> tuple[str, ...]:
    array = arrays[key]
    if array.dtype.kind not in "Uiu" or array.shape != (num_rows,):
        raise DataError(
            f"{source}: {key}: expected texts of shape ({num_rows},), found "
            f"{array.dtype} of shape {array.shape}"
        )
    return tuple(str(one) for one in array.tolist())


def split_texts(texts: Sequence[str], source: str) -> tuple[Split, ...]:
    """Return ``texts``, each of which says a split.

    Raises
    ------
    DataError
        With the first one that does not, and their number.
    """
    wrong = Counter(text for text in texts if text not in SPLITS)
    if wrong:
        text, count = wrong.most_common(1)[0]
        raise DataError(
            f"{source}: found the split {text!r} in {count} examples; "
            f"{alternatives(text, SPLITS)}"
        )
    return tuple(cast("Split", text) for text in texts)


_LOG = logging.getLogger(__name__)

_FORMAT = 1

_ARRAY = "images.npy"

_MOST_FORMS = 3

# Longer than a tick of the clocks that file systems take their times from.
_TICK_NS = 50_000_000


class FileInputs(Inputs, Protocol):
    """Inputs of which each lies in a file."""

    def paths(self) -> Iterator[str]:
        """Yield the file of each input."""


@dataclass(frozen=True, eq=False)
class DecodedFiles:
    """The inputs in files, which are decoded only if this was not done before.

    Attributes
    ----------
    files
        The inputs.
    folder
        Where decoded ones are kept, readable by this user alone. It should be of no
        other use. Where it cannot be written, inputs are decoded each time.

    Notes
    -----
    An entry belongs to the path, size, and times of modification and change of *each*
    file, and to the decoder, the form and the order of what was asked for. When a file
    is new, gone or another, all entries are removed. Otherwise the three that were
    last used are kept, so that tasks with different forms can take turns. Inputs of
    which some cannot be read are not kept: the reason may lie outside of the files.
    """

    files: FileInputs
    folder: Path

    def form(self) -> InputForm:
        """See `Inputs`."""
        return self.files.form()

    def kept_in(self, folder: Path) -> "DecodedFiles":
        """See `Inputs`."""
        return DecodedFiles(self.files, folder)

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `Inputs`.

        What comes from an entry is a private map: it can be written to, which changes
        neither the entry nor what others see.
        """
        listing = _list(self.files.paths())
        entry = self.folder / f"{listing.digest}-{_form(positions, task)}"
        kept = _kept(entry, positions, task)
        if kept is not None:
            return kept
        with self._alone() as is_alone:
            if not is_alone:
                return self.files.read(positions, task)
            kept = _kept(entry, positions, task)
            if kept is not None:
                return kept
            _tidy(self.folder, listing.digest)
            listing.wait_a_tick()
            read = self.files.read(positions, task)
            if not read.unreadable:
                _keep(entry, read.images)
            return read

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Be the only one who decodes; False where the folder cannot be written."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(0o700)
                stack.enter_context(alone(self.folder / "lock"))
            except OSError as error:
                _LOG.warning("inputs are decoded without a cache: %s", error)
                yield False
            else:
                yield True


@dataclass(frozen=True)
class _Listing:
    """The state of all files: a digest, and when the last one changed."""

    digest: str
    changed_ns: int

    def wait_a_tick(self) -> None:
        """Let time pass until another change would be told by another time."""
        left = self.changed_ns + _TICK_NS - time.time_ns()
        if 0 < left <= _TICK_NS:
            time.sleep(left / 1e9)


def _list(paths: Iterator[str]) -> _Listing:
    digest, changed_ns = hashlib.sha256(), 0
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - 50,000 files
        except OSError:
            digest.update(f"{path}\0none\0".encode("utf-8", "surrogateescape"))
            continue
        # A file that was moved over another may have the same size and time of
        # modification, but was changed by the move.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        line = f"{path}\0{status.st_size}\0{times}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
        changed_ns = max(changed_ns, status.st_ctime_ns)
    return _Listing(digest.hexdigest()[:32], changed_ns)


def _form(positions: Sequence[int], task: SiteTask) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, DECODER, _shape(0, task)]).encode())
    digest.update(np.asarray(positions, dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


def _shape(count: int, task: SiteTask) -> tuple[int, ...]:
    return (count, *task.spec.image_shape)


def _kept(entry: Path, positions: Sequence[int], task: SiteTask) -> ReadInputs | None:
    images = read_if_sound(entry, lambda folder: _map(folder, len(positions), task))
    return None if images is None else ReadInputs(images)


def _map(entry: Path, count: int, task: SiteTask) -> Tensor:
    """Return the images of an entry, and note that it was used."""
    images = np.load(entry / _ARRAY, mmap_mode="c", allow_pickle=False)
    expected = _shape(count, task)
    if images.shape != expected or images.dtype != np.uint8:
        raise ValueError(
            f"found {images.dtype} of shape {images.shape}, expected uint8 of shape "
            f"{expected}"
        )
    with contextlib.suppress(OSError):
        os.utime(entry)
    return torch.from_numpy(images)


def _keep(entry: Path, images: Tensor) -> None:
    """Make the entry, if there is room."""

    def fill(folder: Path) -> None:
        # Not into a map: on a full disc that would kill the process.
        np.save(folder / _ARRAY, images.numpy())
        sync_to_disc(folder / _ARRAY)
        sync_to_disc(folder)

    try:
        make_entry(entry, fill)
    except OSError as error:
        _LOG.warning("decoded inputs are not kept in %s: %s", entry, error)


def _tidy(folder: Path, listing: str) -> None:
    """Remove what is of no use any more, and leave room for one more entry."""
    entries = [one for one in folder.iterdir() if one.is_dir()]
    useful = [
        one
        for one in entries
        if one.name.startswith(listing) and not one.name.endswith(UNFINISHED)
    ]
    useful.sort(key=lambda one: one.stat().st_mtime_ns)
    for one in set(entries).difference(useful[-(_MOST_FORMS - 1) :]):
        shutil.rmtree(one, ignore_errors=True)


_MAX_THREADS = 16

_MODES_OF_GREY = ("1", "L")


@dataclass(frozen=True)
class SiteImageFolderSettings(SiteSettings):
    """Where the images are.

    Attributes
    ----------
    path
        The folder, with one folder of images for each class; or with the folders
        ``train``, and ``validation`` and ``test`` where there are any, of which each
        has one folder for each class.
    layout
        ``auto`` takes a folder ``train`` for a split. ``classes`` takes it for a class.
    """

    path: str
    layout: Literal["auto", "classes"] = "auto"


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Inputs as image files; each is brought to the task's size and channels.

    Attributes
    ----------
    root
        A folder.
    names
        Of the files in it.
    """

    root: Path
    names: tuple[str, ...]

    def paths(self) -> Iterator[str]:
        """See `FileInputs`."""
        root = str(self.root)
        return (f"{root}/{name}" for name in self.names)

    def form(self) -> InputForm:
        """Return size and channels of the first image."""
        with open_image(self.root / self.names[0]) as image:
            channels = 1 if image.mode in _MODES_OF_GREY else 3
            return InputForm((image.height, image.width, channels), "uint8")

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `Inputs`; Pillow lets go of Python's lock."""
        if task.spec.dtype != "uint8":
            raise DataError(
                f"{self.root / self.names[0]} is an image, but the federation agreed "
                f"on {KINDS_OF_INPUT[task.spec.dtype]}; give a table or an .npz file"
            )
        height, width, channels = task.spec.image_shape
        if channels not in (1, 3):
            raise DataError(
                f"{self.root / self.names[0]}: image files have 1 or 3 channels, but "
                f"the federation agreed on {channels}; give an .npz file"
            )
        rooms = np.empty((len(positions), height, width, channels), dtype=np.uint8)

        def decode(row: int) -> str | None:
            return _decode_into(rooms[row], self.root / self.names[positions[row]])

        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
            reasons = list(pool.map(decode, range(len(positions)), chunksize=64))
        failed = {
            at: reason
            for at, reason in zip(positions, reasons, strict=True)
            if reason is not None
        }
        good = [row for row, reason in enumerate(reasons) if reason is None]
        return ReadInputs(torch.from_numpy(rooms[good] if failed else rooms), failed)

    def kept_in(self, folder: Path) -> DecodedFiles:
        """See `Inputs`."""
        return DecodedFiles(self, folder)


def collect_image_folder(
    settings: SiteImageFolderSettings,
    base: Path,
    task: SiteTask | None,  # noqa: ARG001 - the signature of every reader
) -> Collected:
    """Return the images in a folder; their names are their paths in it.

    Raises
    ------
    DataError
        If there is no such folder, it holds no images, or something lies where it does
        not belong.
    """
    root = place_of(base, settings.path)
    if not root.is_dir():
        raise DataError(
            f"{root}: there is no such folder; expected {_IMAGE_FOLDER_LAYOUT}"
        )
    if settings.layout == "auto" and (root / "train").is_dir():
        return _split_folders(root)
    found = list_class_folders(root)
    return _collected(root, found.class_of, found.num_ignored)


_IMAGE_FOLDER_LAYOUT = "PATH/CLASS/IMAGE, or PATH/train/CLASS/IMAGE and so on"


def _split_folders(root: Path) -> Collected:
    found: dict[Split, ClassFolders] = {
        split: list_class_folders(root / split) for split in _split_names(root)
    }
    class_of = {
        f"{split}/{name}": folders.class_of[name]
        for split, folders in found.items()
        for name in folders.class_of
    }
    return _collected(
        root,
        {name: class_of[name] for name in mixed(class_of)},
        sum(folders.num_ignored for folders in found.values()),
        frozenset(found),
    )


def _split_names(root: Path) -> list[Split]:
    children = sorted(one for one in root.iterdir() if not one.name.startswith("."))
    names = [child.name for child in children if child.is_dir()]
    for name in names:
        if name not in SPLITS:
            raise DataError(
                f"{root / name}: found beside the folder train, expected a split; "
                f"{alternatives(name, SPLITS)}. If train is a class, set data.layout: "
                "classes"
            )
    return [cast("Split", name) for name in names]


def _collected(
    root: Path,
    class_of: Mapping[str, str],
    num_ignored: int,
    given_splits: frozenset[Split] = frozenset(),
) -> Collected:
    names = tuple(class_of)
    splits = tuple(cast("Split", name.partition("/")[0]) for name in names)
    return Collected(
        source=str(root),
        names=names,
        labels=tuple(class_of.values()),
        inputs=ImageFiles(root, names),
        splits=splits if given_splits else None,
        given_splits=given_splits,
        num_ignored=num_ignored,
    )


def _decode_into(room: NDArray[np.uint8], path: Path) -> str | None:
    """Fill ``room``, (height, width, channels), or return why it cannot be."""
    height, width, channels = room.shape
    try:
        room[...] = read_image(path, channels, (height, width))
    except DataError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class NpzSettings(SiteSettings):
    """Where the file is.

    Attributes
    ----------
    path
        A file with the arrays that `collect_arrays` describes: ``inputs`` and
        ``labels``, or ``train_inputs``, ``train_labels`` and so on.
    """

    path: str


def collect_npz(
    settings: NpzSettings,
    base: Path,
    task: SiteTask | None,  # noqa: ARG001 - the signature of every reader
) -> Collected:
    """Return the examples in an .npz file.

    Raises
    ------
    DataError
        If there is no such file, it is damaged, or laid out otherwise.
    """
    path = place_of(base, settings.path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give the path of an .npz file")
    return collect_arrays(load_arrays(path, KEYS), str(path))


T = TypeVar("T")

_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class PythonSettings(SiteSettings):
    """Which function is called, and with what.

    Attributes
    ----------
    entry
        ``module:function``. The module is looked for beside the client's file first,
        then among the installed ones.
    arguments
        Passed by name, after the folder that relative paths are relative to (a
        `pathlib.Path`) and the task (`SiteTask`, or None where none is known yet).
    """

    entry: Annotated[str, Field(pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    arguments: dict[str, Any] = field(default_factory=dict)


def collect_python(
    settings: PythonSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the examples that a function gives: `SiteData`, or a mapping of arrays.

    A mapping is as `collect_arrays` takes it.

    Raises
    ------
    DataError
        If there is no such function, it fails (with the line), or returns something
        else.
    """
    source = f"data.entry {settings.entry}"
    module_name, _, function_name = settings.entry.partition(":")
    with _importable(base, module_name):
        module = _called(lambda: _module(module_name, base), base, source)
        function = _function(module, function_name, source)
        returned = _called(
            lambda: function(base, task, **settings.arguments), base, source
        )
    if isinstance(returned, SiteData):
        return _called(lambda: _of_site_data(returned, source), base, source)
    if not isinstance(returned, Mapping):
        raise DataError(
            f"{source} returned {type(returned).__name__}, expected SiteData or a "
            "mapping of arrays such as inputs and labels"
        )
    for name in returned:
        if name not in KEYS:
            raise DataError(
                f"{source} returned an array {name!r}; {alternatives(str(name), KEYS)}"
            )
    arrays = _called(
        lambda: {name: np.asarray(value) for name, value in returned.items()},
        base,
        source,
    )
    return collect_arrays(arrays, source)


def _function(module: ModuleType, name: str, source: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise DataError(
            f"{source}: {module.__file__} has no function {name!r}; "
            f"{alternatives(name, known)}"
        )
    return function  # type: ignore[no-any-return]


def _module(name: str, base: Path) -> ModuleType:
    """Return the module beside the client's file as it is now, or an installed one."""
    place = base.joinpath(*name.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return _fresh(name, file)
    return importlib.import_module(name)


class _AsItIsNow(SourceFileLoader):
    """Compiles the file each time.

    Kept bytecode is told from a changed file by its size and by whole seconds.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of what the file holds."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _fresh(name: str, file: Path) -> ModuleType:
    loader = _AsItIsNow(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module there while it is being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(base: Path, name: str) -> Iterator[None]:
    """Let modules in ``base`` import each other inside the block.

    Afterwards ``name`` is the module that it was before, if any.
    """
    before = sys.modules.get(name)
    sys.path.insert(0, str(base))
    try:
        yield
    finally:
        sys.path.remove(str(base))
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def _called(call: Callable[[], T], base: Path, source: str) -> T:
    """Return what the owner's code returns; its errors become ours, with the place."""
    try:
        return call()
    except KnnPerError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if Path(one.filename).is_relative_to(base)]
        frame = (own or frames)[-1]
        raise DataError(
            f"{source} failed with {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno}); mend the function, or its "
            "data.arguments"
        ) from error


def _of_site_data(data: SiteData, source: str) -> Collected:
    """Return data that is split and labelled as what a reader found."""
    parts = list(data.splits())
    class_of = dict(enumerate(data.task.class_names))
    return Collected(
        source=source,
        names=tuple(name for _, part in parts for name in part.names),
        labels=tuple(
            class_of[label]
            for _, part in parts
            for label in part.examples.labels.tolist()
        ),
        inputs=ArrayInputs(
            source, np.concatenate([part.examples.images.numpy() for _, part in parts])
        ),
        splits=tuple(split for split, part in parts for _ in part.names),
        given_splits=frozenset(split for split, _ in parts),
    )


@dataclass(frozen=True)
class SiteTableSettings(SiteSettings):
    """Which file, and what its columns mean.

    Attributes
    ----------
    path
        A CSV file with a header, or a Parquet file.
    label
        The column of labels: names of classes, or whole numbers.
    features
        The columns of features in the federation's order; null is those that the
        federation agreed on by name or, where it did not, all other columns.
    id
        The column of the examples' names; null names them by their row.
    split
        The column that says train, validation or test; null splits by `fractions`.
    delimiter
        Between the columns of a CSV file.
    """

    path: str
    label: str
    features: tuple[str, ...] | None = None
    id: str | None = None
    split: str | None = None
    delimiter: Annotated[str, Field(min_length=1)] = ","


def collect_table(
    settings: SiteTableSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the examples in a table.

    A row without a name is called by its number from 0, as in ``00012``.

    Raises
    ------
    DataError
        As `read_table`; and if labels are missing, or a split has another name.
    """
    table = read_table(
        place_of(base, settings.path),
        _columns(settings, task),
        settings.delimiter,
    )
    source = str(table.path)
    labels = table.filled_texts(settings.label)
    names = row_names(table) if settings.id is None else table.texts[settings.id]
    splits = None
    if settings.split is not None:
        splits = split_texts(table.texts[settings.split], source)
    return Collected(
        source=source,
        names=names,
        labels=labels,
        inputs=ArrayInputs(source, table.numbers),
        splits=splits,
        given_splits=frozenset(splits or ()),
        numbered=are_whole_numbers(labels),
    )


def _columns(settings: SiteTableSettings, task: SiteTask | None) -> Columns:
    texts = (settings.label, settings.id, settings.split)
    agreed = task.feature_names if task is not None else ()
    return Columns(
        tuple(dict.fromkeys(name for name in texts if name is not None)),
        settings.features if settings.features is not None else agreed or None,
    )


_EXPECTED = "a file of plain text, or a folder of such files (.txt)"


@dataclass(frozen=True)
class SiteTextSettings(SiteSettings):
    """Which texts, and how examples are made of them.

    Attributes
    ----------
    path
        A file of plain text in UTF-8, or a folder of such files (``.txt``).
    stride
        Characters from one that is predicted to the next.
    """

    path: str
    stride: PositiveInt = PlaysSettings.stride


@dataclass(frozen=True, eq=False)
class WindowInputs(ArrayInputs):
    """Windows of ids, uint8 of shape (n, 1, 1, T)."""

    def form(self) -> InputForm:
        """See `Inputs`."""
        return InputForm((1, 1, self.array.shape[3]), "token")


@dataclass(frozen=True, eq=False)
class _Windowed:
    """The n examples of one text, in its order.

    Attributes
    ----------
    targets
        Places of the characters that are predicted, int64 of shape (n,).
    windows, labels
        The ids before them, uint8 of shape (n, 1, 1, T), and their own, (n,).
    """

    targets: NDArray[np.int64]
    windows: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    @classmethod
    def of(cls, text: str, window: int, stride: int) -> "_Windowed":
        """Return the examples of a text."""
        ids = encode(text)
        targets = target_positions(len(ids), window, stride)
        return cls(targets, windows_before(ids, targets, window), ids[targets])


def collect_text(
    settings: SiteTextSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the windows of a site's texts, as long as the federation agreed on.

    Without a task they are as long as those of plays. An example is called by the place
    of the character that is predicted, as in ``00000080``, behind the file's name where
    the path is a folder. The beginning of each text is trained on and its end is tested
    on: windows overlap, so that examples drawn at random would give away each other.

    Raises
    ------
    DataError
        If there is no text, all are too short, or the federation agreed on something
        else than text in this alphabet.
    """
    path = place_of(base, settings.path)
    _require_text(task, path)
    window = PlaysSettings.window if task is None else task.spec.image_shape[2]
    files = read_files(path, _EXPECTED)
    texts = [_Windowed.of(plain_text(one), window, settings.stride) for one in files]
    if not any(len(text.targets) for text in texts):
        raise DataError(
            f"{path}: found no text with more than {window} characters, of which a "
            "window is made; give more text"
        )
    prefixes = [f"{one.path.name}/" if path.is_dir() else "" for one in files]
    labels = itertools.chain.from_iterable(text.labels.tolist() for text in texts)
    splits = (_in_order(len(text.targets), settings.fractions) for text in texts)
    return Collected(
        source=str(path),
        names=tuple(_text_names(texts, prefixes)),
        labels=tuple(CHARACTER_NAMES[label] for label in labels),
        inputs=WindowInputs(str(path), np.concatenate([one.windows for one in texts])),
        splits=tuple(itertools.chain.from_iterable(splits)),
        given_splits=frozenset(SPLITS),
    )


def _require_text(task: SiteTask | None, path: Path) -> None:
    if task is None or task.class_names == CHARACTER_NAMES:
        return
    found = "other characters"
    if task.spec.dtype != "token":
        found = KINDS_OF_INPUT[task.spec.dtype]
    raise DataError(
        f"{path} is read as text of {len(CHARACTER_NAMES)} characters, but the "
        f"federation agreed on {found}; give data of another kind"
    )


def _text_names(texts: Sequence[_Windowed], prefixes: Sequence[str]) -> list[str]:
    return [
        f"{prefix}{target:08d}"
        for text, prefix in zip(texts, prefixes, strict=True)
        for target in text.targets.tolist()
    ]


def _in_order(count: int, fractions: FractionSettings) -> list[Split]:
    """Return the split of each example: first train, then validation, then test."""
    held_out = fractions.validation + fractions.test
    num_train = max(int((1 - held_out) * count + 0.5), min(count, 1))
    num_known = max(int((1 - fractions.test) * count + 0.5), num_train)
    sizes = (num_train, num_known - num_train, count - num_known)
    return [
        split for split, size in zip(SPLITS, sizes, strict=True) for _ in range(size)
    ]
