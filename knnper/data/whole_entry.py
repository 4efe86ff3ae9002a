"""Folders that a cache makes: whole or not there, by one process at a time."""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = ".unfinished"
"""How the name of a folder ends that is being made, or was when a process died."""


def read_if_sound(entry: Path, read: Callable[[Path], T]) -> T | None:
    """Return what ``read`` makes of ``entry``; None where it is missing or damaged."""
    if not entry.exists():
        return None
    try:
        return read(entry)
    except (OSError, ValueError, EOFError, KeyError) as error:
        _LOG.warning("%s is damaged (%s) and will be decoded again", entry, error)
        return None


def make_entry(entry: Path, fill: Callable[[Path], None]) -> None:
    """Make ``entry`` in place of what is there; only the holder of the lock may.

    Parameters
    ----------
    entry
        A folder. It is made beside its final place and renamed when it is complete, so
        a half-made one is never seen.
    fill
        Puts files into the empty folder that it is given, and sees to it that they are
        on the disc.
    """
    unfinished = entry.with_name(f"{entry.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        fill(unfinished)
        shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_to_disc(entry.parent)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Be the only one in this block; the system lets go when a process dies.

    Raises
    ------
    OSError
        If there can be no such file.
    """
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync_to_disc(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disc."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
