"""Decode image files into arrays."""

import contextlib
import hashlib
import io
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from knnper.data.cache import (
    Build,
    CentralSplit,
    DatasetContents,
    EntryWriter,
    Source,
    cached_dataset,
)
from knnper.data.class_folders import UNREADABLE_SUFFIXES, suffix_of
from knnper.data.examples import KINDS_OF_INPUT, DataFormat, Dataset
from knnper.data.folders import unreachable_reason
from knnper.data.image_cache import cached_images
from knnper.data.pixel_depth import wide_pixels
from knnper.data.site_data import OnError
from knnper.data.site_inputs import InputForm, ReadInputs, SiteInputs
from knnper.data.site_task import SiteTask
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason
from knnper.settings import PositiveInt

_LOG = logging.getLogger(__name__)
_MODES = {1: "L", 3: "RGB"}
_MODES_OF_GREY = ("1", "L")
_FORMATS_OF_SEQUENCES = ("GIF", "PNG", "WEBP", "TIFF", "AVIF")
_FILES_PER_TASK = 256
_MAX_THREADS = 16
_MOST_SHOWN = 50
DECODER = f"3, Pillow {PIL.__version__}"
"""Version of the decoder; part of the cache key, since it determines the pixels."""
ImageShape: TypeAlias = tuple[int, int, int]
"""(height, width, channels)."""


class EncodedImage(NamedTuple):
    """Content of an image file, and its name in errors."""

    name: str
    content: bytes


ImageSource: TypeAlias = str | Path | EncodedImage
"""An image that is not decoded yet: the path or the content of a file."""


def read_image(
    picture: ImageSource, channels: int, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Decode one image to uint8 of shape (height, width, channels).

    The image is converted to 3 ``channels`` (colour) or 1 (grey), and resized to
    ``size`` (height, width) if given. Raises a `DataError` if it cannot be decoded.
    """
    with open_image(picture) as image:
        return _pixels_of(image, channels, size)


def _pixels_of(
    image: Image.Image, channels: int, size: tuple[int, int] | None
) -> NDArray[np.uint8]:
    converted = upright(image).convert(_MODES[channels])
    if size is not None:
        resampling = Image.Resampling.BILINEAR
        converted = converted.resize((size[1], size[0]), resampling)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(converted.height, converted.width, channels)


def upright(image: Image.Image) -> Image.Image:
    """Rotate an image by its orientation in EXIF, which cameras store."""
    try:
        return ImageOps.exif_transpose(image)
    except (struct.error, KeyError, IndexError, TypeError, AttributeError):
        return image  # The EXIF data is damaged.


@contextlib.contextmanager
def open_image(picture: ImageSource) -> Iterator[Image.Image]:
    """Open an image without decoding it."""
    name, file = _name_of(picture), cast("Any", picture)
    if isinstance(picture, EncodedImage):
        file = io.BytesIO(picture.content)
    # Opening a named pipe would block until something is written to it.
    elif unreachable := unreachable_reason(name):
        raise DataError(
            f"{name} cannot be read as an image: it {unreachable}; remove or fix it"
        )
    try:
        with Image.open(file) as image:
            wide = wide_pixels(image)
            if wide is not None:
                raise DataError(
                    f"{name}: found {wide} pixels (mode {image.mode}), expected "
                    "8-bit; scale them to 0-255 and save them again"
                )
            yield image
    except DataError:
        raise
    # Decoders raise errors of many types for damaged files and new formats.
    except Exception as error:
        # Pillow would name the file again.
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = _why_unknown(name) if is_unknown else error or type(error).__name__
        raise DataError(
            f"{name} cannot be read as an image: {reason}; remove or fix it"
        ) from error


def _why_unknown(name: str) -> str:
    suffix = suffix_of(name)
    if suffix in UNREADABLE_SUFFIXES:
        return f"Pillow reads no {suffix}, unlike PNG and JPEG"
    return "it is none, damaged, or of a kind that Pillow does not read"


def decode_files(
    pictures: Sequence[ImageSource], images: NDArray[np.uint8], like: str | None = None
) -> dict[int, str]:
    """Decode n files into ``images``; return errors of unreadable files by position.

    ``images``, shape (n, height, width, channels), is in memory or on disk. Without
    ``like``, all files are resized to its height and width. With the name of the file
    that has this size, files of other sizes raise a `DataError`.
    """
    height, width, channels = images.shape[1:]
    failed: dict[int, str] = {}
    others: dict[int, str] = {}
    sequences: list[str] = []

    def decode_from(start: int) -> None:
        for at in range(start, min(start + _FILES_PER_TASK, len(pictures))):
            try:
                size = (height, width) if like is None else None
                with open_image(pictures[at]) as image:
                    pixels = _pixels_of(image, channels, size)
                    if _is_sequence(image):
                        sequences.append(_name_of(pictures[at]))
            except DataError as error:
                failed[at] = str(error)
                continue
            if pixels.shape == images.shape[1:]:
                images[at] = pixels
                continue
            others[at] = (
                f"images differ in size: {like} is {width}x{height} but "
                f"{_name_of(pictures[at])} is {pixels.shape[1]}x{pixels.shape[0]} "
                "(width x height); set data.image_size to resize all to one size"
            )

    # Threads run in parallel, since Pillow releases the interpreter's lock.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        starts = range(0, len(pictures), _FILES_PER_TASK)
        deque(pool.map(decode_from, starts), maxlen=0)
    if sequences:
        _LOG.warning(
            "%d of %d files hold several images, as frames or pages, such as %s: only "
            "the first of each is read",
            len(sequences),
            len(pictures),
            min(sequences),
        )
    if others:
        # The files are readable; the user must change the settings.
        require_all_read(why for _, why in sorted({**failed, **others}.items()))
    return dict(sorted(failed.items()))


def _is_sequence(image: Image.Image) -> bool:
    """Test whether a file has several frames; a camera's preview does not count."""
    is_kind = image.format in _FORMATS_OF_SEQUENCES
    return is_kind and bool(getattr(image, "is_animated", False))


def _name_of(picture: ImageSource) -> str:
    return picture.name if isinstance(picture, EncodedImage) else str(picture)


def require_all_read(failed: Iterable[str]) -> None:
    """Raise a `DataError` with the first errors of unreadable examples, if any."""
    reasons = list(failed)
    if len(reasons) == 1:
        raise DataError(
            reasons[0], reason=SafeReason(Code.UNREADABLE_EXAMPLES, count=1)
        )
    if reasons:
        num_more = len(reasons) - _MOST_SHOWN
        lines = reasons[:_MOST_SHOWN] + (
            [f"and {num_more} more"] if num_more > 0 else []
        )
        raise DataError(
            f"{len(reasons)} examples cannot be read:\n"
            + "\n".join(f"  - {line}" for line in lines),
            reason=SafeReason(Code.UNREADABLE_EXAMPLES, count=len(reasons)),
        )


def decode_all(paths: Sequence[Path], image_shape: ImageShape) -> Tensor:
    """Decode files to uint8 of shape (n, *image_shape); raise if any is unreadable."""
    images = _allocate(len(paths), image_shape, str(paths[0]))
    require_all_read(decode_files(list(map(str, paths)), images).values())
    return torch.from_numpy(images)


def _allocate(count: int, image_shape: ImageShape, path: str) -> NDArray[np.uint8]:
    if image_shape[2] not in _MODES:
        shape = " x ".join(map(str, image_shape))
        raise DataError(
            f"{path}: image files have 1 or 3 channels, but the expected inputs have "
            f"the shape {shape}; give an .npz file",
            reason=SafeReason(Code.WRONG_KIND),
        )
    return np.empty((count, *image_shape), dtype=np.uint8)


def digests_of(images: NDArray[np.generic]) -> list[bytes]:
    """Hash each of n inputs."""
    return [
        hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
        for image in images
    ]


def write_images(
    writer: EntryWriter,
    pictures: Mapping[CentralSplit, Sequence[ImageSource]],
    image_size: int | None,
    channels: int,
) -> dict[CentralSplit, dict[int, str]]:
    """Decode the files of each split in order; ``train`` needs at least one file.

    Returns the errors of unreadable files by split and position.
    """
    like, width, height = None, image_size or 0, image_size or 0
    if image_size is None:
        like, (width, height) = _first_size(pictures["train"])
    digests: dict[CentralSplit, list[bytes]] = {}
    failed: dict[CentralSplit, dict[int, str]] = {}
    for split, files in pictures.items():
        images = writer.new_images(split, (len(files), height, width, channels))
        failed[split] = decode_files(files, images, like)
        digests_by_position = enumerate(digests_of(images))
        digests[split] = [
            digest for at, digest in digests_by_position if at not in failed[split]
        ]
    trained_on = set(digests["train"])
    num_copies = sum(digest in trained_on for digest in digests["test"])
    if num_copies:
        _LOG.warning(
            "%d of %d test images are exact copies of training images, so measured "
            "accuracies will be too high; remove the copies from one of the two",
            num_copies,
            len(digests["test"]),
        )
    return failed


def _first_size(pictures: Sequence[ImageSource]) -> tuple[str, tuple[int, int]]:
    """Return the name and (width, height) of the first image that can be opened."""
    reasons = []
    for picture in pictures:
        try:
            with open_image(picture) as image:
                return _name_of(picture), upright(image).size
        except DataError as error:
            reasons.append(str(error))
    require_all_read(reasons)
    raise DataError("found no train images, expected at least one")


@dataclass(frozen=True, kw_only=True)
class ImageSettings(DataFormat):
    """Base class of formats of image files: size, channels, and unreadable files.

    Attributes
    ----------
    image_size
        Height and width in pixels to which every image is resized; null keeps the size
        of the files, which must then be the same for all.
    channels
        3 for colour, 1 for grey.
    on_error
        ``refuse`` raises an error that lists all unreadable images, ``skip`` leaves
        them out and logs their number.
    """

    image_size: PositiveInt | None = None
    channels: Literal[1, 3] = 3
    on_error: OnError = "refuse"

    def load_images(
        self,
        source: Source,
        files: Mapping[CentralSplit, Sequence[ImageSource]],
        describe: Callable[[EntryWriter], DatasetContents],
    ) -> Dataset:
        """Load the images from the cache or decode them.

        ``describe`` stores the labels and returns the description of the data set.
        """
        return self.load_cached(
            source, lambda writer: self.write_entry(writer, files, describe)
        )

    def write_entry(
        self,
        writer: EntryWriter,
        files: Mapping[CentralSplit, Sequence[ImageSource]],
        describe: Callable[[EntryWriter], DatasetContents],
    ) -> DatasetContents:
        """Decode the images into a cache entry; see `load_images`."""
        failed = write_images(writer, files, self.image_size, self.channels)
        reasons = [why for part in failed.values() for why in part.values()]
        if self.on_error == "refuse":
            require_all_read(reasons)
        contents = describe(writer)
        for split, part in failed.items():
            if part:
                writer.drop(split, part)
        return replace(contents, num_skipped=len(reasons))

    def load_cached(self, source: Source, build: Build) -> Dataset:
        """Load the data set of a source from the cache, or build its entry."""
        form: dict[str, str | int | None] = {
            "decoder": DECODER,
            "image_size": self.image_size,
            "channels": self.channels,
        }
        if self.on_error != "refuse":
            form["on_error"] = self.on_error
        return cached_dataset(self.name, {**source, **form}, build)


@dataclass(frozen=True, eq=False)
class ImageFiles(SiteInputs):
    """Inputs in the image files ``names`` of the folder ``root``."""

    root: Path
    names: tuple[str, ...]

    def form(self) -> InputForm:
        """Return the size and channels of the first image that can be opened."""
        reasons = []
        for name in self.names:
            try:
                with open_image(self.root / name) as image:
                    channels = 1 if image.mode in _MODES_OF_GREY else 3
                    image = upright(image)
                    return (image.height, image.width, channels), "uint8"
            except DataError as error:
                reasons.append(str(error))
        require_all_read(reasons)
        raise DataError(f"{self.root} contains no images, expected at least one")

    def read(
        self, positions: Sequence[int], task: SiteTask, cache: Path | None = None
    ) -> ReadInputs:
        """Decode the images to the task's size and channels."""
        paths = [f"{self.root}/{name}" for name in self.names]
        shape = task.spec.image_shape
        if task.spec.dtype != "uint8":
            raise DataError(
                f"{paths[0]} is an image, but the federation agreed on "
                f"{KINDS_OF_INPUT[task.spec.dtype]}; give a table or an .npz file",
                reason=SafeReason(Code.WRONG_KIND),
            )

        def decode() -> tuple[NDArray[np.uint8], Mapping[int, str]]:
            room = _allocate(len(positions), shape, paths[0])
            failed = decode_files([paths[at] for at in positions], room)
            good = [row for row in range(len(room)) if row not in failed]
            reasons = {positions[row]: why for row, why in failed.items()}
            return (room[good] if failed else room), reasons

        if cache is None:
            images, failed = decode()
        else:
            form = (DECODER, shape, list(positions))
            room = (len(positions), *shape)
            images, failed = cached_images(cache, paths, form, room, decode)
        return ReadInputs(torch.from_numpy(images), failed)
