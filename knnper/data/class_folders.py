"""List image files in folders of classes, of clients and classes, or of domains."""

import hashlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from knnper.data.dividing import clean_name, warn_of_merged
from knnper.data.folders import (
    is_folder,
    is_reachable,
    list_folder,
    no_folder_reason,
    require_reachable,
)
from knnper.errors import DataError, warn_once
from knnper.reasons import Code, SafeReason

_LOG = logging.getLogger(__name__)
_MOST_SHOWN, _MOST_SUFFIXES = 50, 8

# Suffixes of image formats that Pillow may not read: of phones and cameras, of medicine
# and microscopes, and of libraries that a build of Pillow may lack.
UNREADABLE_SUFFIXES = frozenset(
    (
        *(".heic", ".heif", ".heics", ".hif", ".avif", ".avifs", ".jxl", ".webp"),
        *(".jp2", ".j2k", ".jxr", ".wdp", ".bpg", ".svg", ".exr", ".hdr", ".xcf"),
        *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2"),
        *(".orf", ".rw2", ".raf", ".pef", ".srw", ".3fr", ".fff", ".iiq", ".raw"),
        *(".rwl", ".x3f", ".dcm", ".dicom", ".ima", ".nii", ".mha", ".mhd", ".nrrd"),
        *(".mrc", ".svs", ".ndpi", ".czi", ".nd2", ".lif", ".pam"),
    )
)

# Files with unknown suffixes cause a warning from this number and share of a class on.
_FEWEST_UNREAD, _NOTABLE_SHARE = 3, 0.1


def shuffle_by_hash(names: Iterable[str]) -> list[str]:
    """Return ``names`` in a pseudo-random order that depends on the names alone."""

    def place(name: str) -> bytes:
        encoded = name.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(encoded, digest_size=16).digest()

    return sorted(names, key=place)


def suffix_of(name: str) -> str:
    """Return the suffix of a file name in lower case, such as ``.png``."""
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - of 50,000 files


def _is_readable(name: str) -> bool:
    """Test whether Pillow reads files with this suffix."""
    return suffix_of(name) in Image.registered_extensions()


def _is_image(name: str) -> bool:
    """Test whether a file has the suffix of an image format, readable or not."""
    return _is_readable(name) or suffix_of(name) in UNREADABLE_SUFFIXES


def _select_folders(entries: Iterable[os.DirEntry[str]], kind: str) -> tuple[str, ...]:
    """Return the names of folders; raise for images and broken links beside them."""
    names: list[str] = []
    for entry in entries:
        if is_folder(entry):
            names.append(entry.name)
            continue
        require_reachable(entry)
        if _is_image(entry.name):
            raise DataError(
                f"{entry.path} is a file where a {kind} folder is expected",
                reason=SafeReason(Code.WRONG_LAYOUT),
            )
    return tuple(names)


def _list_files(folder: Path) -> list[os.DirEntry[str]]:
    """Return the files in the folder of a class, including broken links."""
    entries = list_folder(folder)
    for entry in entries:
        if is_folder(entry):
            raise DataError(
                f"{entry.path} is a folder where an image is expected",
                reason=SafeReason(Code.WRONG_LAYOUT),
            )
    return entries


@dataclass(frozen=True)
class ClassFolders:
    """Listing of the layout ROOT/CLASS/IMAGE; ``class_of`` is by CLASS/IMAGE."""

    classes: tuple[str, ...]
    class_of: Mapping[str, str]
    num_ignored: int
    warnings: tuple[str, ...] = ()


def list_class_folders(root: Path) -> ClassFolders:
    """List the images in ROOT/CLASS, without hidden files and other suffixes."""
    children = list_folder(root)
    classes = _select_folders(children, "class")
    files = {name: _list_files(root / name) for name in classes}
    class_of = {
        f"{class_name}/{file.name}": class_name
        for class_name, listed in files.items()
        for file in listed
        # Broken links stay in the list and are reported as unreadable images.
        if _is_readable(file.name) or not is_reachable(file)
    }
    num_files = len(children) - len(classes) + sum(map(len, files.values()))
    names = {name: [file.name for file in listed] for name, listed in files.items()}
    return ClassFolders(
        classes,
        {name: class_of[name] for name in shuffle_by_hash(class_of)},
        num_files - len(class_of),
        unread_warnings(root, names),
    )


def unread_warnings(root: Path, names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a warning about files that look like images but are not read, if any.

    ``names`` are the file names of each class. Files count if their suffix is that of
    an image format, or if they are a considerable part of a class. Files beside an
    image of the same name do not count: raw files of cameras, annotations of tools.
    """
    suffixes = Counter[str]()
    parts: list[str] = []
    for class_name, files in names.items():
        readable = [name for name in files if _is_readable(name)]
        known = {*readable, *(Path(name).stem for name in readable)}
        unread = [
            name
            for name in files
            if not _is_readable(name) and Path(name).stem not in known
        ]
        num_files = len(readable) + len(unread)
        is_notable = len(unread) >= max(_FEWEST_UNREAD, _NOTABLE_SHARE * num_files)
        if is_notable or any(_is_image(name) for name in unread):
            suffixes.update(suffix_of(name) or "no suffix" for name in unread)
            parts.append(f"{len(unread)} of {num_files} of {class_name!r}")
    if not parts:
        return ()
    shown = ", ".join(suffix for suffix, _ in suffixes.most_common(_MOST_SUFFIXES))
    remainder = (
        f" and {len(parts) - _MOST_SHOWN} more" if len(parts) > _MOST_SHOWN else ""
    )
    return (
        f"{root}: {suffixes.total()} files are left out, since files with their "
        f"suffixes ({shown}) cannot be read as images: "
        f"{', '.join(parts[:_MOST_SHOWN])}{remainder}; convert them to PNG or JPEG",
    )


class ListedFile(NamedTuple):
    """A file with its path below the root, such as FOLDER/CLASS/FILE.

    Class and user are the names of the folders, normalised by `clean_name`.
    """

    name: str
    class_name: str
    num_bytes: int
    modified_ns: int
    user: str | None = None


def warn_of_unread(root: Path, files: Iterable["ListedFile"]) -> None:
    """Log `unread_warnings` about files that are left out as unreadable."""
    names = defaultdict[str, list[str]](list)
    for file in files:
        names[file.class_name].append(Path(file.name).name)
    for warning in unread_warnings(root, names):
        warn_once(_LOG, warning)


def require_folder(folder: Path, layout: str) -> None:
    """Raise a `DataError` that names the expected layout if there is no folder."""
    if reason := no_folder_reason(folder):
        raise DataError(f"{folder} {reason}; data.root must hold {layout}")


def folder_names(folder: Path, layout: str, kind: str = "class") -> tuple[str, ...]:
    """Return the names of the folders in ``folder``; raise for images beside them."""
    require_folder(folder, layout)
    names = _select_folders(list_folder(folder), kind)
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{folder}: found the {kind} folder {name!r}, whose name is not "
                "UTF-8; rename it"
            ) from error
    return names


def files_below(
    root: Path, folder: str, layout: str, user: str | None = None
) -> list[ListedFile]:
    """List the files in ROOT/FOLDER/CLASS by class and name; raise if empty."""
    base = root / folder
    files = [
        ListedFile(
            os.path.join(folder, name, file.name),  # noqa: PTH118 - no folder is none
            clean_name(name),
            *_state_of(file),
            None if user is None else clean_name(user),
        )
        for name in folder_names(base, layout)
        for file in _list_files(base / name)
    ]
    if not files:
        raise DataError(f"{base} holds no images; put them into {base}/CLASS")
    return files


def _state_of(file: os.DirEntry[str]) -> tuple[int, int]:
    """Return size and time of modification; zeros for a broken link."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def files_of_users(root: Path, folder: str, layout: str) -> list[ListedFile]:
    """List the files in ROOT/FOLDER/USER/CLASS, or in ROOT/FOLDER/CLASS."""
    base = root / folder
    names = folder_names(base, layout)
    below = [entry for name in names for entry in list_folder(base / name)]
    kinds = {
        is_folder(entry) for entry in below if is_folder(entry) or _is_image(entry.name)
    }
    if kinds != {True}:
        return files_below(root, folder, layout)
    users = [(name, os.path.join(folder, name)) for name in names]  # noqa: PTH118
    return [
        file for name, path in users for file in files_below(root, path, layout, name)
    ]


def warn_of_merged_folders(root: Path, files: Sequence[ListedFile]) -> None:
    """Log how many folders of classes and users are merged by `clean_name`."""
    folders = [Path(file.name).parent for file in files]
    warn_of_merged((folder.name for folder in folders), "classes", str(root))
    if files and files[0].user is not None:
        users = (folder.parent.name for folder in folders)
        warn_of_merged(users, "clients", str(root))


def digest_of_files(class_names: Sequence[str], files: Iterable[ListedFile]) -> str:
    """Hash the class names, and the paths, sizes and times of modification of files."""
    digest = hashlib.sha256("\0".join(class_names).encode())
    for file in files:
        line = f"{file.name}\0{file.num_bytes}\0{file.modified_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
