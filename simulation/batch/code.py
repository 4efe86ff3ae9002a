"""Which code made a run: one that is found may be older than its table."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from knnper.durable_files import write_atomically

CODE = "code.txt"
"""In a run's folder: the fingerprint of the code that made it."""

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("knnper", "datastore", "strategies", "client", "server", "simulation")


@functools.cache
def code_fingerprint() -> str:
    """Return a SHA-256, in hexadecimal, of the project's Python files."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_ROOT)}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def sign(folder: Path) -> None:
    """Note in a run's folder that this code makes it, unless other code began it."""
    if not (folder / CODE).is_file():
        write_atomically(folder / CODE, code_fingerprint())


def sign_as(folder: Path, origin: Path) -> None:
    """Note that a run has a part of the one in ``origin``: older code made both."""
    if _signature(folder) in ("", code_fingerprint()):
        write_atomically(folder / CODE, _signature(origin))


def is_of_this_code(folder: Path) -> bool:
    """Return whether no other code had a part in a run."""
    return _signature(folder) == code_fingerprint()


def num_made_otherwise(folders: Iterable[Path]) -> int:
    """Return how many of the runs in these folders other code made."""
    return sum(not is_of_this_code(folder) for folder in folders)


def older_code(folders: Iterable[Path], batch: Path) -> Iterator[str]:
    """Yield what to tell of runs that other code made.

    Parameters
    ----------
    folders
        Of the runs.
    batch
        The folder that holds them.
    """
    if older := num_made_otherwise(folders):
        yield (
            f"{older} of the runs in {batch} were made by another version of this "
            "code, or go on from a training of another or an unknown one; to have all "
            "from this one, delete the folder and start again, training anew"
        )


def _signature(folder: Path) -> str:
    path = folder / CODE
    return path.read_text(encoding="utf-8") if path.is_file() else ""
