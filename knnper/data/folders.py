"""Entries of a folder of data, without those of systems; links that lead nowhere."""

import os
import stat
from pathlib import Path

from knnper.errors import DataError
from knnper.reasons import Code, SafeReason

# In small letters: what Windows, macOS, archivers, network storage and notebooks put
# beside files. Names with a dot in front (.DS_Store, ._photo.jpg) are left out anyway.
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
    """Return whether a file or folder of this name is hidden, or of a system's own."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, without `is_clutter`.

    Raises a `DataError` where the folder cannot be listed.
    """
    # Entries know what they are, where a path asks the file system each time.
    try:
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not is_clutter(entry.name)]
    except OSError as error:
        reason = why_unreachable(str(folder)) or f"cannot be listed: {error.strerror}"
        raise DataError(
            f"{folder} {reason}; expected a folder that may be read",
            reason=SafeReason(Code.MISSING_FILE),
        ) from error
    return sorted(kept, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or into a folder without permission
        return False


def is_reachable(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file or a folder, or a link to one."""
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False


def why_unreachable(path: str) -> str | None:
    """Return why a path leads to neither a file nor a folder; None where it does."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - of 50,000 files
    except ValueError as error:
        return f"cannot be a path: {error}"  # It holds a NUL.
    except OSError as error:
        if not os.path.islink(path):  # noqa: PTH114
            is_missing = isinstance(error, FileNotFoundError)
            return (
                "is not there" if is_missing else f"cannot be reached: {error.strerror}"
            )
        target = os.readlink(path)  # noqa: PTH115
        return f"is a link to {target}, which cannot be followed: {error.strerror}"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "is neither a file nor a folder"


def why_no_folder(path: Path) -> str | None:
    """Return why there is no folder at ``path``; None where there is one."""
    reason = why_unreachable(str(path))
    return "is not a folder" if reason is None and not path.is_dir() else reason


def require_reachable(entry: os.DirEntry[str]) -> None:
    """Refuse, with a `DataError`, what leads to neither a file nor a folder."""
    if not is_reachable(entry):
        reason = why_unreachable(entry.path)
        raise DataError(
            f"{entry.path} {reason}; expected a file or a folder, mount or remove it",
            reason=SafeReason(Code.MISSING_FILE),
        )


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in ``folder``; refuse links that lead nowhere."""
    entries = list_folder(folder)
    for entry in entries:
        require_reachable(entry)
    return [entry.name for entry in entries if is_folder(entry)]
