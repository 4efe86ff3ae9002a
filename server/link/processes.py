"""Processes below this one, however they came there, and a note of them."""

import contextlib
import ctypes
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from knnper.durable_files import write_atomically

_PR_SET_CHILD_SUBREAPER = 36
_NOTE = "processes.json"


@dataclass(frozen=True)
class Note:
    """What a running server says of its processes, for `knnper doctor`.

    Attributes
    ----------
    superlink
        Process id of Flower's SuperLink.
    starts
        How often it was started since the server was.
    """

    superlink: int
    starts: int

    def write(self, state: Path) -> None:
        """Write the note into the server's state folder."""
        write_atomically(state / _NOTE, json.dumps(asdict(self)))

    @staticmethod
    def read(state: Path) -> tuple["Note", float] | None:
        """Return the note and how many seconds ago it was true; None without one."""
        try:
            found = Note(**json.loads((state / _NOTE).read_text()))
            return found, time.time() - (state / _NOTE).stat().st_mtime
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def is_true(state: Path) -> None:
        """Take down that the SuperLink answers, and is asked for runs to start."""
        with contextlib.suppress(OSError):
            os.utime(state / _NOTE)

    def lives(self) -> bool:
        """Whether the SuperLink's process is there, and is one."""
        with contextlib.suppress(OSError):
            return b"superlink" in Path(f"/proc/{self.superlink}/cmdline").read_bytes()
        return False


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
