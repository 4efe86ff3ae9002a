"""Where a site's data is, as people would write it."""

import os
from pathlib import Path


def place_of(base: Path, path: str) -> Path:
    """Return where ``path`` leads from the folder ``base``, with no way back in it.

    Parameters
    ----------
    base
        Where a relative path starts.
    path
        As in a client's file; ``~`` is the home of its owner.
    """
    given = base / Path(path).expanduser()
    short = Path(os.path.normpath(given))
    # From behind a symbolic link, .. leads elsewhere.
    return short if short.resolve() == given.resolve() else given
