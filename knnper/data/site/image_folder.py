"""A site's data as image files: PATH/CLASS/FILE, or PATH/SPLIT/CLASS/FILE."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.config.suggestions import alternatives
from knnper.data.class_folders import ClassFolders, list_class_folders, mixed
from knnper.data.examples import KINDS_OF_INPUT
from knnper.data.image_file import open_image, read_image
from knnper.data.site.agreement import SiteTask
from knnper.data.site.collected import (
    Collected,
    InputForm,
    ReadInputs,
    SiteSettings,
)
from knnper.data.site.decoded_files import DecodedFiles
from knnper.data.site.place import place_of
from knnper.data.site.splits import SPLITS, Split

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
        """See `knnper.data.site.decoded_files.FileInputs`."""
        root = str(self.root)
        return (f"{root}/{name}" for name in self.names)

    def form(self) -> InputForm:
        """Return size and channels of the first image."""
        with open_image(self.root / self.names[0]) as image:
            channels = 1 if image.mode in _MODES_OF_GREY else 3
            return InputForm((image.height, image.width, channels), "uint8")

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `knnper.data.site.collected.Inputs`; Pillow lets go of Python's lock."""
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
        """See `knnper.data.site.collected.Inputs`."""
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
        raise DataError(f"{root}: there is no such folder; expected {_LAYOUT}")
    if settings.layout == "auto" and (root / "train").is_dir():
        return _split_folders(root)
    found = list_class_folders(root)
    return _collected(root, found.class_of, found.num_ignored)


_LAYOUT = "PATH/CLASS/IMAGE, or PATH/train/CLASS/IMAGE and so on"


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
