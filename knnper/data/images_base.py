"""Images in one folder for each class."""

import contextlib
import hashlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from knnper.data.cache import EntryWriter, Split
from knnper.errors import DataError

_LAYOUT = "train/CLASS/FILE and test/CLASS/FILE"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file; ``name`` is relative to the class folder."""

    class_name: str
    name: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class FolderListing:
    """The files of both splits, sorted by class and name.

    Attributes
    ----------
    root
        The folder that holds ``train`` and ``test``.
    class_names
        Sorted; a label is a position in it.
    files
        For each split.
    """

    splits: ClassVar[tuple[Split, ...]] = ("train", "test")

    root: Path
    class_names: tuple[str, ...]
    files: dict[Split, list[FoundFile]]

    def paths(self, split: Split) -> list[str]:
        """Return the n files of a split."""
        base = str(self.root / split)
        return [
            os.path.join(base, file.class_name, file.name)  # noqa: PTH118 - 60,000 files
            for file in self.files[split]
        ]

    def labels(self, split: Split) -> list[int]:
        """Return the n labels of a split."""
        label_of = {name: label for label, name in enumerate(self.class_names)}
        return [label_of[file.class_name] for file in self.files[split]]

    def fingerprint(self) -> str:
        """Return a digest of all relative paths, sizes, and times of modification."""
        return digest_of(self.class_names, self.files.items())


def list_folder(root: Path) -> FolderListing:
    """Return what is below ``root``, without hidden files.

    Raises
    ------
    DataError
        If a split or a class of ``train`` is missing or empty, ``test`` has a class
        that ``train`` has not, or something lies where it does not belong.
    """
    class_names = folder_names(root / "train", _LAYOUT)
    unknown = sorted(set(folder_names(root / "test", _LAYOUT)) - set(class_names))
    if unknown:
        raise DataError(
            f"{root / 'test'} has classes that {root / 'train'} does not have: "
            f"{', '.join(unknown)}; the classes are those of train"
        )
    splits = FolderListing.splits
    files = {split: files_below(root / split, _LAYOUT) for split in splits}
    _require_images_of_all(root / "train", class_names, files["train"])
    return FolderListing(root, class_names, files)


def _require_images_of_all(
    folder: Path, class_names: Sequence[str], files: Sequence[FoundFile]
) -> None:
    empty = sorted(set(class_names) - {file.class_name for file in files})
    if empty:
        raise DataError(
            f"{folder} holds no images of the classes {', '.join(empty)}, expected one "
            "at least of each; add some, or remove these folders"
        )


def digest_of(
    class_names: Sequence[str], files: Iterable[tuple[str, Sequence[FoundFile]]]
) -> str:
    """Return a digest of all relative paths, sizes, and times of modification.

    Parameters
    ----------
    files
        Of each folder that holds class folders, its name and its files.
    """
    digest = hashlib.sha256("\0".join(class_names).encode())
    for folder, found in files:
        for file in found:
            path = f"{folder}/{file.class_name}/{file.name}"
            line = f"{path}\0{file.num_bytes}\0{file.modified_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def folder_names(folder: Path, layout: str, what: str = "class") -> tuple[str, ...]:
    """Return the names of the folders in ``folder``, sorted, without hidden ones.

    Parameters
    ----------
    layout
        What ``data.root`` must hold; said where it does not.
    what
        What each of the folders stands for.

    Raises
    ------
    DataError
        If ``folder`` is none, or holds files or a name that is not UTF-8.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; data.root must hold {layout}")
    children = [child for child in folder.iterdir() if not child.name.startswith(".")]
    for child in children:
        if not child.is_dir():
            raise DataError(f"{child} is a file where a {what} folder is expected")
        if not _is_utf8(child.name):
            raise DataError(
                f"{folder}: found the {what} folder {child.name!r}, whose name is not "
                "UTF-8; rename it"
            )
    return tuple(sorted(child.name for child in children))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def files_below(folder: Path, layout: str) -> list[FoundFile]:
    """Return the files in ``folder``/CLASS, sorted by class and name.

    Raises
    ------
    DataError
        If there is none, or something lies where it does not belong.
    """
    found = [
        file
        for name in folder_names(folder, layout)
        for file in _files_of_class(folder, name)
    ]
    if not found:
        raise DataError(f"{folder} holds no images; put them into {folder}/CLASS")
    return found


def _files_of_class(folder: Path, class_name: str) -> list[FoundFile]:
    with os.scandir(folder / class_name) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in visible:
        if entry.is_dir():
            raise DataError(f"{entry.path} is a folder where an image is expected")
    stats = ((entry.name, entry.stat()) for entry in sorted(visible, key=_name))
    return [
        FoundFile(class_name, name, status.st_size, status.st_mtime_ns)
        for name, status in stats
    ]


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


_MODES = {1: "L", 3: "RGB"}

_WIDE_PIXELS = {"I;16": "16-bit", "I": "16-bit or 32-bit", "F": "floating-point"}

DECODER = f"2, Pillow {PIL.__version__}"
"""What `read_image` makes of a file may be another with another one of these."""


def read_image(
    path: str | Path, channels: int, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Return one image, uint8 of shape (height, width, channels).

    Parameters
    ----------
    path
        Of a file in any format that Pillow reads.
    channels
        3 for colour, 1 for grey; others are converted.
    size
        Height and width that it is resized to; None keeps its own.

    Raises
    ------
    DataError
        If `open_image` does not take it, or it cannot be decoded.
    """
    with open_image(path) as image:
        converted = image.convert(_MODES[channels])
    if size is not None:
        height, width = size
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(converted.height, converted.width, channels)


@contextlib.contextmanager
def open_image(path: str | Path) -> Iterator[Image.Image]:
    """Open an image, of which nothing is decoded yet.

    Raises
    ------
    DataError
        If it cannot be read, in this block either, or its pixels are grey ones of more
        than 8 bits. Pillow itself scales colours of 16 bits to 8.
    """
    try:
        with Image.open(path) as image:
            _require_8_bits(path, image.mode)
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}; remove or mend it"
        ) from error


def wide_pixels(mode: str) -> str | None:
    """Return what pixels of more than 8 bits a mode of Pillow's has; None with others.

    To convert them would cut them off at 255.
    """
    # The modes I;16B, I;16L and I;16N differ in the order of the bytes.
    return _WIDE_PIXELS.get(mode[:4])


def _require_8_bits(path: str | Path, mode: str) -> None:
    found = wide_pixels(mode)
    if found is not None:
        raise DataError(
            f"{path}: found {found} pixels (mode {mode}), expected 8-bit; scale them "
            "to 0-255 and save them again"
        )


ImageShape = tuple[int, int, int]
"""(height, width, channels)."""


@dataclass(frozen=True)
class ClassFolders:
    """What lies in ROOT/CLASS/IMAGE.

    Attributes
    ----------
    classes
        The names of the folders, sorted.
    class_of
        The class of each image, by its path in the root, in an order that mixes the
        classes and depends on the paths alone.
    num_ignored
        Files that are no images by their suffix.
    """

    classes: tuple[str, ...]
    class_of: Mapping[str, str]
    num_ignored: int


def list_class_folders(root: Path) -> ClassFolders:
    """Return the images in ``root``, without hidden files.

    Raises
    ------
    DataError
        If something lies where it does not belong.
    """
    visible = [one for one in root.iterdir() if not one.name.startswith(".")]
    folders = sorted(one for one in visible if one.is_dir() or is_image(one))
    for path in folders:
        if not path.is_dir():
            raise DataError(
                f"{path} is a file where the folder of a class is expected: give a "
                "folder as in SOURCE/CLASS/IMAGE"
            )
    suffixes = Image.registered_extensions()
    files = [(folder.name, name) for folder in folders for name in _files(folder)]
    class_of = {
        f"{folder}/{name}": folder
        for folder, name in files
        if os.path.splitext(name)[1].lower() in suffixes  # noqa: PTH122 - 50,000 files
    }
    return ClassFolders(
        tuple(folder.name for folder in folders),
        {name: class_of[name] for name in mixed(class_of)},
        len(visible) - len(folders) + len(files) - len(class_of),
    )


def is_image(path: Path) -> bool:
    """Return whether the suffix is one of an image that can be read."""
    return path.suffix.lower() in Image.registered_extensions()


def mixed(names: Iterable[str]) -> list[str]:
    """Return ``names`` in an order as good as chance, but always the same."""
    return sorted(names, key=_place)


def decoded(paths: Sequence[Path], image_shape: ImageShape) -> Tensor:
    """Return images, uint8 of shape (n, *image_shape).

    Raises
    ------
    DataError
        If one cannot be read, or inputs of this shape are no images.
    """
    height, width, channels = image_shape
    if channels not in (1, 3):
        shape = " x ".join(map(str, image_shape))
        raise DataError(
            f"{paths[0]}: image files have 1 or 3 channels, but inputs of the shape "
            f"{shape} are expected; give an .npz file"
        )
    images = torch.empty((len(paths), *image_shape), dtype=torch.uint8)
    for row, path in enumerate(paths):
        pixels = read_image(path, channels, (height, width))
        images[row] = torch.from_numpy(pixels.copy())
    return images


def _files(folder: Path) -> Iterator[str]:
    # Entries know what they are, where a path asks the file system each time.
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_file():
                raise DataError(f"{entry.path} is a folder where an image is expected")
            yield entry.name


def _place(name: str) -> bytes:
    encoded = name.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(encoded, digest_size=16).digest()


_LOG = logging.getLogger(__name__)

_FILES_PER_TASK = 256

_MAX_THREADS = 16


@dataclass(frozen=True)
class ImageForm:
    """What images are decoded to.

    Attributes
    ----------
    image_size
        Height and width that every image is resized to, in pixels; None keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    """

    image_size: int | None
    channels: int

    def decoded(self, path: str) -> NDArray[np.uint8]:
        """Return one image, uint8 of shape (height, width, channels).

        Raises
        ------
        DataError
            If it cannot be read.
        """
        square = self.image_size
        size = None if square is None else (square, square)
        return read_image(path, self.channels, size)


def write_images(
    writer: EntryWriter, paths: Mapping[Split, Sequence[str]], form: ImageForm
) -> None:
    """Decode the files of each split, in their order; ``train`` has one at least.

    Raises
    ------
    DataError
        If a split has no files, a file cannot be read, or the sizes differ while the
        form keeps them. The message names the file.

    Notes
    -----
    Logs a warning where test images are copies of training images.
    """
    first = paths["train"][0]
    width, height = _opened_size(first, form)
    digests: dict[Split, NDArray[np.uint64]] = {}
    for split, files in paths.items():
        shape = (len(files), height, width, form.channels)
        images = writer.new_images(split, shape)
        digests[split] = _decode_all(files, images, first, form)
    _warn_of_copies(digests)


def _decode_all(
    paths: Sequence[str], images: NDArray[np.uint8], first: str, form: ImageForm
) -> NDArray[np.uint64]:
    """Fill ``images`` with threads; Pillow lets go of the interpreter's lock.

    Returns
    -------
    A digest of each of the n images, shape (n,).
    """
    digests = np.empty(len(paths), dtype=np.uint64)

    def decode_from(start: int) -> None:
        for position in range(start, min(start + _FILES_PER_TASK, len(paths))):
            pixels = form.decoded(paths[position])
            if pixels.shape != images.shape[1:]:
                raise _unequal_sizes(first, images.shape[1:], paths[position], pixels)
            images[position] = pixels
            digests[position] = _digest(pixels)

    threads = min(os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        # Reading the results raises the first error, which cancels what has not begun.
        deque(pool.map(decode_from, range(0, len(paths), _FILES_PER_TASK)), maxlen=0)
    return digests


def _digest(pixels: NDArray[np.uint8]) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _warn_of_copies(digests: Mapping[Split, NDArray[np.uint64]]) -> None:
    copied = int(np.isin(digests["test"], digests["train"]).sum())
    if copied:
        _LOG.warning(
            "%d of %d test images are copies of training images, in every pixel: "
            "accuracies will be measured too high; remove the copies from one of the "
            "two",
            copied,
            len(digests["test"]),
        )


def _opened_size(path: str, form: ImageForm) -> tuple[int, int]:
    """Return (width, height) of the decoded images."""
    if form.image_size is not None:
        return form.image_size, form.image_size
    with open_image(path) as image:
        return image.size


def _unequal_sizes(
    first: str, expected: tuple[int, ...], path: str, pixels: NDArray[np.uint8]
) -> DataError:
    return DataError(
        f"images differ in size: {first} is {expected[1]}x{expected[0]} but {path} is "
        f"{pixels.shape[1]}x{pixels.shape[0]} (width x height); set data.image_size to "
        "resize all to one size"
    )
