"""What tells that a folder is a run's, and how it is emptied without losing that."""

import shutil
from pathlib import Path

EXPERIMENT = "experiment.yaml"
LOCK = ".lock"

# Deleting a folder hangs on this line: it must not occur in files people write.
FIRST_LINE = "# All settings of the run in this folder; written by `knnper simulate`.\n"


def is_run(path: Path) -> bool:
    """Return whether the folder holds a run that this project began."""
    try:
        with (path / EXPERIMENT).open(encoding="utf-8", errors="replace") as file:
            return file.readline() == FIRST_LINE
    except OSError:
        return False


def make_empty(path: Path) -> None:
    """Delete the run in ``path``, if there is one, but for the lock that is held."""
    entries = [entry for entry in path.iterdir() if entry.name != LOCK]
    # What tells that it is a run goes last: a deletion that is cut short can be redone.
    for entry in sorted(entries, key=lambda entry: entry.name == EXPERIMENT):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
