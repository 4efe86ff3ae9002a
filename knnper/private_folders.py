"""Folders that only their owner can look into, whatever the umask says."""

import logging
import os
import stat
from pathlib import Path

_OTHERS = 0o077

_LOG = logging.getLogger(__name__)


def make_private(folder: Path) -> None:
    """Make a folder for this user alone; take others' rights from one that is there.

    What is below it is then out of reach, too, whatever its own permissions are. The
    folder of another user stays as it is.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if is_private(folder) or status.st_uid != os.geteuid():
        return
    mode = stat.S_IMODE(status.st_mode)
    folder.chmod(mode & ~_OTHERS)
    _LOG.warning(
        "%s could be looked into by other users (mode %04o); from now on it cannot",
        folder,
        mode,
    )


def is_private(folder: Path) -> bool:
    """Return whether no other user can look into a folder."""
    return stat.S_IMODE(folder.stat().st_mode) & _OTHERS == 0
