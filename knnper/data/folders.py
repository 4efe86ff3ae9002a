"""List folders of data without system files, and detect broken links."""

import os
import stat
from pathlib import Path

from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

# Lower-case names that Windows, macOS, archivers, network storage and notebooks create.
# Names with a leading dot (.DS_Store, ._photo.jpg) are skipped anyway.
_SYSTEM_NAMES = frozenset(
    {
        "thumbs.db",
        "ehthumbs.db",
        "ehthumbs_vista.db",
        "desktop.ini",
        "icon\r",
        "__macosx",
        "__pycache__",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "network trash folder",
        "temporary items",
        "@eadir",
        "@recycle",
        "@recently-snapshot",
        "#recycle",
        "#snapshot",
    }
)


def is_clutter(name: str) -> bool:
    """Test whether a name is that of a hidden file or a system file."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder sorted by name, without `is_clutter`.

    Raises a `DataError` if the folder cannot be listed.
    """
    # os.scandir knows the type of each entry; pathlib would ask the file system again.
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not is_clutter(entry.name)]
    except OSError as error:
        reason = (
            unreachable_reason(str(folder)) or f"cannot be listed: {error.strerror}"
        )
        raise DataError(
            f"{folder} {reason}; expected a folder that may be read",
            reason=SafeReason(Code.MISSING_FILE),
        ) from error
    return sorted(visible, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Test whether an entry is a folder or a link to a folder."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder without permission
        return False


def is_reachable(entry: os.DirEntry[str]) -> bool:
    """Test whether an entry is a file, a folder or a link to either."""
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False


def unreachable_reason(path: str) -> str | None:
    """Return why a path is neither a file nor a folder, or None if it is one."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - of 50,000 files
    except ValueError as error:
        return f"cannot be a path: {error}"  # It contains a NUL.
    except OSError as error:
        if not os.path.islink(path):  # noqa: PTH114
            is_missing = isinstance(error, FileNotFoundError)
            return (
                "does not exist"
                if is_missing
                else f"cannot be reached: {error.strerror}"
            )
        target = os.readlink(path)  # noqa: PTH115
        return f"is a link to {target}, which cannot be followed: {error.strerror}"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "is neither a file nor a folder"


def no_folder_reason(path: Path) -> str | None:
    """Return why ``path`` is not a folder, or None if it is a folder."""
    reason = unreachable_reason(str(path))
    return "is not a folder" if reason is None and not path.is_dir() else reason


def require_reachable(entry: os.DirEntry[str]) -> None:
    """Raise a `DataError` if an entry leads to neither a file nor a folder."""
    if not is_reachable(entry):
        reason = unreachable_reason(entry.path)
        raise DataError(
            f"{entry.path} {reason}; expected a file or a folder, mount or remove it",
            reason=SafeReason(Code.MISSING_FILE),
        )


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in ``folder``; raise for broken links."""
    entries = list_folder(folder)
    for entry in entries:
        require_reachable(entry)
    return [entry.name for entry in entries if is_folder(entry)]
