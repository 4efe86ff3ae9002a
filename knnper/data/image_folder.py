"""Images as files: ROOT/train/CLASS/FILE and ROOT/test/CLASS/FILE."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from knnper.config.errors import DataError
from knnper.config.ranges import PositiveInt
from knnper.config.sections import Settings
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.folder_listing import FolderListing, list_folder
from knnper.data.image_file import read_image, unreadable

_FILES_PER_TASK = 256
_MAX_THREADS = 16


@dataclass(frozen=True)
class ImageFolderSettings(Settings):
    """Where the images are and what they are decoded to.

    Attributes
    ----------
    root
        The folder that holds ``train`` and ``test``, each with one folder per class.
    image_size
        Height and width that every image is resized to, in pixels; null keeps the
        size, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    client_separator
        Where file names begin with the name of the client whose image it is, the text
        that ends this name: "_" for ``f0123_17.png``. The partition ``natural`` needs
        it.
    """

    root: str
    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    client_separator: Annotated[str, Field(min_length=1)] | None = None


def load_image_folder(settings: ImageFolderSettings) -> Dataset:
    """Return the images below ``settings.root``; the classes are those of ``train``.

    Hidden files are left out.

    Raises
    ------
    DataError
        If the folder is not laid out as expected, an image cannot be read, or the
        sizes differ while ``image_size`` is null. The message names the file.
    """
    listing = list_folder(Path(settings.root).expanduser().absolute())
    source = {
        "files": listing.fingerprint(),
        "image_size": settings.image_size,
        "channels": settings.channels,
        "client_separator": settings.client_separator,
    }
    return cached_dataset(
        "image_folder", source, lambda writer: _build(writer, listing, settings)
    )


def _build(
    writer: EntryWriter, listing: FolderListing, settings: ImageFolderSettings
) -> Contents:
    first = listing.paths("train")[0]
    width, height = _opened_size(first, settings)
    for split in listing.splits:
        paths = listing.paths(split)
        shape = (len(paths), height, width, settings.channels)
        _decode_all(paths, writer.new_images(split, shape), first, settings)
        writer.put_labels(split, listing.labels(split))
    if settings.client_separator is not None:
        _put_clients(writer, listing, settings.client_separator)
    return Contents(listing.class_names)


def _decode_all(
    paths: list[str],
    images: NDArray[np.uint8],
    first: str,
    settings: ImageFolderSettings,
) -> None:
    """Fill ``images`` with threads; Pillow lets go of the interpreter's lock."""

    def decode_from(start: int) -> None:
        for position in range(start, min(start + _FILES_PER_TASK, len(paths))):
            pixels = _decode(paths[position], settings)
            if pixels.shape != images.shape[1:]:
                raise _unequal_sizes(first, images.shape[1:], paths[position], pixels)
            images[position] = pixels

    threads = min(os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        # Reading the results raises the first error, which cancels what has not begun.
        deque(pool.map(decode_from, range(0, len(paths), _FILES_PER_TASK)), maxlen=0)


def _decode(path: str, settings: ImageFolderSettings) -> NDArray[np.uint8]:
    """Return one image, uint8 of shape (height, width, channels)."""
    square = settings.image_size
    size = None if square is None else (square, square)
    return read_image(path, settings.channels, size)


def _opened_size(path: str, settings: ImageFolderSettings) -> tuple[int, int]:
    """Return (width, height) of the decoded images."""
    if settings.image_size is not None:
        return settings.image_size, settings.image_size
    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error


def _unequal_sizes(
    first: str, expected: tuple[int, ...], path: str, pixels: NDArray[np.uint8]
) -> DataError:
    return DataError(
        f"images differ in size: {first} is {expected[1]}x{expected[0]} but {path} is "
        f"{pixels.shape[1]}x{pixels.shape[0]} (width x height); set data.image_size to "
        "resize all to one size"
    )


def _put_clients(writer: EntryWriter, listing: FolderListing, separator: str) -> None:
    """Store for each image its client, numbered in the order of their names."""
    owners: dict[Split, list[str]] = {
        split: [_owner(path, separator) for path in listing.paths(split)]
        for split in listing.splits
    }
    names = sorted({name for split in owners.values() for name in split})
    number_of = {name: number for number, name in enumerate(names)}
    for split, split_owners in owners.items():
        writer.put_client_ids(split, [number_of[name] for name in split_owners])


def _owner(path: str, separator: str) -> str:
    owner, found, _ = Path(path).name.partition(separator)
    if not found or not owner:
        raise DataError(
            f"the name of {path} does not begin with a client's name and "
            f"{separator!r}; rename it, or set data.client_separator to null"
        )
    return owner
