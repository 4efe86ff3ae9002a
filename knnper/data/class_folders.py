"""Images in one folder for each class."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from knnper.config.errors import DataError
from knnper.data.image_file import read_image

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
