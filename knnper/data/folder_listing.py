"""What files ROOT/train/CLASS and ROOT/test/CLASS hold."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from knnper.config.errors import DataError
from knnper.data.cache_entry import Split


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
        digest = hashlib.sha256("\0".join(self.class_names).encode())
        for split in self.splits:
            for file in self.files[split]:
                path = f"{split}/{file.class_name}/{file.name}"
                line = f"{path}\0{file.num_bytes}\0{file.modified_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def list_folder(root: Path) -> FolderListing:
    """Return what is below ``root``, without hidden files.

    Raises
    ------
    DataError
        If a split is missing or empty, ``test`` has a class that ``train`` has not, or
        something lies where it does not belong.
    """
    class_names = _class_names(root / "train")
    unknown = sorted(set(_class_names(root / "test")) - set(class_names))
    if unknown:
        raise DataError(
            f"{root / 'test'} has classes that {root / 'train'} does not have: "
            f"{', '.join(unknown)}; the classes are those of train"
        )
    files = {split: _files(root / split) for split in FolderListing.splits}
    return FolderListing(root, class_names, files)


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; data.root must hold train/CLASS/FILE and "
            "test/CLASS/FILE"
        )
    children = [child for child in folder.iterdir() if not child.name.startswith(".")]
    for child in children:
        if not child.is_dir():
            raise DataError(f"{child} is a file where a class folder is expected")
    return tuple(sorted(child.name for child in children))


def _files(folder: Path) -> list[FoundFile]:
    found = [
        file for name in _class_names(folder) for file in _files_of_class(folder, name)
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
