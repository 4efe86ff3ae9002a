"""Folders that have to be written to, and whether there is room."""

import shutil
import tempfile
from pathlib import Path

from knnper.transport.diagnosis.finding import Finding, fine, problem, warning

_MEGABYTE = 1_000_000
_TOO_LITTLE_MB = 100
_LITTLE_MB = 1000


def folder_finding(folder: Path, setting: str) -> Finding:
    """Return whether ``folder`` can be written, or made, and what room there is.

    Parameters
    ----------
    folder
        It need not exist, and is not made.
    setting
        Where the folder is set, for the advice.
    """
    place = _nearest(folder)
    if not place.is_dir():
        return problem(
            f"{place} is a file",
            f"move it away, or set `{setting}` to another folder",
            "a folder",
        )
    try:
        # It has no name, and is gone at once.
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return problem(
            f"{place} cannot be written ({error.strerror})",
            f"give the user that runs this the right to write there (chown), or set "
            f"`{setting}` to another folder",
        )
    return _room(folder, place)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the one above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def _room(folder: Path, place: Path) -> Finding:
    free_mb = shutil.disk_usage(place).free // _MEGABYTE
    found = f"{folder} can be written, {free_mb:,} MB are free"
    advice = "make room on this disk, or move the folder to another one"
    if free_mb < _TOO_LITTLE_MB:
        return problem(found, advice, f"at least {_TOO_LITTLE_MB} MB")
    if free_mb < _LITTLE_MB:
        return warning(found, advice, f"at least {_LITTLE_MB:,} MB")
    return fine(found if folder == place else f"{found}; it is yet to be made")
