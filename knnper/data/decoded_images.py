"""Image files of both splits, decoded into the arrays of a cache entry."""

import hashlib
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.data.cache_entry import EntryWriter, Split
from knnper.data.image_file import open_image, read_image

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
