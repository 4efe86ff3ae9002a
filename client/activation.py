"""The node of a state folder: one at a time, and a note of the one that is online.

A node that was killed counts as online for a minute, and Flower rejects a second one
with the same key during it. The folder is locked by its node, so the process that holds
the lock and finds a note may deactivate the node that the note names.
"""

import contextlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from knnper import files
from knnper.errors import RunError

LOCK_FILE = "node.lock"
_NOTE_FILE = "node.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def lock_state(state: Path) -> Iterator[None]:
    """Lock a state folder for this process; the kernel releases it when that ends."""
    try:
        files.make_private(state)
        lock = files.FileLock(state / LOCK_FILE)
    except files.LockHeldError as error:
        raise RunError(
            f"the state folder {state} is in use by another `knnper fed client` "
            f"(process {error}); end that one, or give this client another folder"
        ) from error
    except OSError as error:
        raise RunError(
            f"the folder {state} cannot be written: {error}; make it writable for this "
            "user, or set another `state`"
        ) from error
    with lock:
        yield


def node_process(state: Path) -> int | None:
    """Return the process that has locked a state folder; None if none has."""
    process = files.lock_holder(state / LOCK_FILE)
    if process is None:
        return None
    return int(process) if process.isdecimal() else 0  # it has not written its id yet


@dataclass(frozen=True)
class Activation:
    """The note in a state folder of the node that is online.

    ``place`` identifies the folder and the boot of its machine: a copy of the folder
    must not deactivate the original's node.
    """

    state: Path
    place: str

    @classmethod
    def of(cls, state: Path) -> "Activation":
        """Return the note of a folder that was locked before."""
        machine = platform.node()
        if _BOOT_ID.exists():
            machine = _BOOT_ID.read_text().strip()
        return cls(state, f"{machine}:{(state / LOCK_FILE).stat().st_ino}")

    def note(self, node_id: int) -> None:
        """Record that the node is online."""
        content = {"node_id": str(node_id), "place": self.place}
        files.write_atomically(self._path, json.dumps(content))

    def forget(self) -> None:
        """Record that the node has left."""
        self._path.unlink(missing_ok=True)

    def left_behind(self) -> int | None:
        """Return the id of a node of this folder that did not leave; None without."""
        try:
            content = files.parse_json(files.read_plain(self._path))
            return int(content["node_id"]) if content["place"] == self.place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def _path(self) -> Path:
        return self.state / _NOTE_FILE
