"""Taking up one's own place in the federation again after a crash.

A node that was killed counts as online for a minute, and Flower refuses a second one
with the same key meanwhile. The state folder is locked, so whoever finds that the last
node of this very folder did not leave may take it out.
"""

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from knnper.durable_files import write_atomically

_FILE = "node.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Activation:
    """A state folder's note of the node that is online.

    Attributes
    ----------
    state
        The folder.
    place
        Says which folder on which running machine this is: with a copy of the folder,
        another machine cannot put out the node here.
    """

    state: Path
    place: str

    @staticmethod
    def of(state: Path, lock: int) -> "Activation":
        """Return the note of a folder whose lock is held as the descriptor ``lock``."""
        machine = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
        return Activation(state, f"{machine}:{os.fstat(lock).st_ino}")

    def note(self, node_id: int) -> None:
        """Write down that the node is online."""
        content = {"node_id": str(node_id), "place": self.place}
        write_atomically(self._path, json.dumps(content))

    def forget(self) -> None:
        """Write down that it has left."""
        self._path.unlink(missing_ok=True)

    def left_behind(self) -> int | None:
        """Return the id of a node of this folder that did not leave; None without."""
        try:
            content = json.loads(self._path.read_text())
            return int(content["node_id"]) if content["place"] == self.place else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def _path(self) -> Path:
        return self.state / _FILE
