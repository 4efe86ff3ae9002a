"""Examples in one folder of images for each class."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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
class FolderSource:
    """Images in one folder for each class.

    An image's external id is its path in the folder; its size is made that of the
    store's, as the data set ``image_folder`` does with ``image_size``.
    """

    root: Path
    external_ids: tuple[str, ...]
    labels: Tensor
    image_shape: ImageShape
    num_ignored: int = 0
    arrivals: None = None

    def images(self, positions: Sequence[int]) -> Tensor:
        """See `datastore.care.sources.Source`."""
        paths = [self.root / self.external_ids[one] for one in positions]
        return decoded(paths, self.image_shape)


def folder_source(
    root: Path, image_shape: ImageShape, class_names: Sequence[str]
) -> FolderSource:
    """Return the images in ``root``, in an order that mixes the classes.

    The order depends on their paths in the folder alone: a policy that keeps the first
    or the last ones must not keep those of one class.

    Parameters
    ----------
    root
        Has one folder for each class; what is no image by its suffix is left out.
    image_shape
        What they are made.
    class_names
        One for each label.

    Raises
    ------
    DataError
        If a class is unknown, or something lies where it does not belong.
    """
    label_of = {name: label for label, name in enumerate(class_names)}
    visible = [one for one in root.iterdir() if not one.name.startswith(".")]
    folders = sorted(one for one in visible if one.is_dir() or is_image(one))
    _require_classes(root, folders, label_of)
    files = [path for folder in folders for path in _files(folder)]
    images = {
        path.relative_to(root).as_posix(): label_of[path.parent.name]
        for path in files
        if is_image(path)
    }
    names = sorted(images, key=_place)
    return FolderSource(
        root,
        tuple(names),
        torch.tensor([images[name] for name in names], dtype=torch.int64),
        image_shape,
        len(visible) - len(folders) + len(files) - len(images),
    )


def is_image(path: Path) -> bool:
    """Return whether the suffix is one of an image that can be read."""
    return path.suffix.lower() in Image.registered_extensions()


def decoded(paths: Sequence[Path], image_shape: ImageShape) -> Tensor:
    """Return images, uint8 of shape (n, *image_shape).

    Raises
    ------
    DataError
        If one cannot be read.
    """
    height, width, channels = image_shape
    images = torch.empty((len(paths), *image_shape), dtype=torch.uint8)
    for row, path in enumerate(paths):
        pixels = read_image(path, channels, (height, width))
        images[row] = torch.from_numpy(pixels.copy())
    return images


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if not path.is_file():
            raise DataError(f"{path} is a folder where an image is expected")
        yield path


def _place(name: str) -> bytes:
    """Return what an image is sorted by: as good as chance, but always the same."""
    encoded = name.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def _require_classes(
    root: Path, folders: Sequence[Path], label_of: Mapping[str, int]
) -> None:
    for path in folders:
        if not path.is_dir():
            raise DataError(
                f"{path} is a file where the folder of a class is expected: give a "
                "folder as in SOURCE/CLASS/IMAGE"
            )
    unknown = [path.name for path in folders if path.name not in label_of]
    if unknown:
        raise DataError(
            f"{root} has folders of classes that the store does not know: "
            f"{', '.join(unknown)}; expected some of {', '.join(label_of)}. Rename "
            "them, or leave them out"
        )
