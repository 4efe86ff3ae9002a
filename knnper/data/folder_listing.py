"""What files ROOT/train/CLASS and ROOT/test/CLASS hold."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from knnper.config.errors import DataError
from knnper.data.cache_entry import Split

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
