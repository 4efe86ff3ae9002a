"""One node a state folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from knnper.config.errors import RunError
from knnper.private_folders import make_private

LOCK_FILE = "node.lock"
"""The file in a client's state folder that is locked while its node runs."""


@contextlib.contextmanager
def locked(state: Path) -> Iterator[int]:
    """Hold a state folder for this process; the kernel frees it when it ends.

    Parameters
    ----------
    state
        The folder; it is created if need be, and closed to other users.

    Yields
    ------
    int
        The lock file's descriptor.

    Raises
    ------
    RunError
        If another process holds it, or it cannot be written.
    """
    descriptor = _opened(state)
    try:
        _lock(descriptor, state)
        yield descriptor
    finally:
        os.close(descriptor)


def holder(state: Path) -> int | None:
    """Return the process that holds a state folder; None if none does.

    Nothing is written; who holds the folder notices nothing.
    """
    try:
        descriptor = os.open(state / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.pread(descriptor, 20, 0) or 0)
    finally:
        os.close(descriptor)
    return None


def is_locked(state: Path) -> bool:
    """Return whether a node runs on this state folder."""
    return holder(state) is not None


def _opened(state: Path) -> int:
    try:
        make_private(state)
        return os.open(state / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunError(
            f"the state folder {state} cannot be written: {error}. Make it writable "
            "for the user that runs the client, or set `state` to another folder"
        ) from error


def _lock(descriptor: int, state: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        other = os.pread(descriptor, 20, 0).decode() or "unknown"
        raise RunError(
            f"the state folder {state} is in use by another `knnper client` (process "
            f"{other}). End that one first, or give this client a folder of its own"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
