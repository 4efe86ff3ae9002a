"""Processes below this one, however they came there."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(patience: float) -> None:
    """End all children, kindly first; wait until they are gone.

    Parameters
    ----------
    patience
        Seconds between SIGTERM and SIGKILL.
    """
    deadline = time.monotonic() + patience
    told: set[int] = set()
    while children := {child for child in _children() if not _reaped(child)}:
        late = time.monotonic() > deadline
        for child in children if late else children - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL if late else signal.SIGTERM)
        told |= children
        time.sleep(0.05)


def _children() -> set[int]:
    processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {int(entry.name) for entry in processes if _parent(entry) == os.getpid()}


def _parent(process: Path) -> int | None:
    """Return the parent of a folder of ``/proc``; None once the process is gone."""
    try:
        status = (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold any character.
    return int(status.rpartition(")")[2].split()[1])


def _reaped(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True
