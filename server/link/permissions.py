"""What the server keeps is its own user's: other users' sites, keys and runs."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_to_owner(folder: Path) -> None:
    """Make ``folder``, and let nobody else into what is in it, now and later.

    What this process and those that it starts write from now on has the permissions
    0700 and 0600.
    """
    os.umask(_OTHERS)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    num_open = sum(_closed(path) for path in (folder, *folder.rglob("*")))
    if num_open:
        logger.warning(
            "other users could get at %d files and folders in %s; they no longer can",
            num_open,
            folder,
        )


def _closed(path: Path) -> bool:
    """Take others' permissions away if it is ours; return whether there were any."""
    try:
        found = path.lstat()
        is_ours = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
        if not is_ours or not found.st_mode & _OTHERS:
            return False
        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return False
    return True
