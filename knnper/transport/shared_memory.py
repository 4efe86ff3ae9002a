"""Vectors as files in memory, which the processes of one machine share."""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MEMORY_FILE_SYSTEM = Path("/dev/shm")
# A container's default of 64 MB would fill up in the middle of a round.
LEAST_FREE_BYTES = 256 * 1024**2
_PREFIX = "knnper-"
_IN_USE, _FREE = ".f32", ".free"
_FOLDER_NAME = re.compile(rf"{_PREFIX}\d+-[0-9a-f]{{8}}")
_FILE_NAME = re.compile(rf"\d+-[0-9a-f]{{32}}{re.escape(_IN_USE)}")


def is_available() -> bool:
    """Return whether this machine has a file system in memory with room to spare."""
    if not os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        return False
    for folder in MEMORY_FILE_SYSTEM.glob(f"{_PREFIX}*"):  # left behind by a kill
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return shutil.disk_usage(MEMORY_FILE_SYSTEM).free >= LEAST_FREE_BYTES


@contextlib.contextmanager
def shared_folder() -> Iterator[Path | None]:
    """Create a folder in memory for one run, None without room; remove it."""
    if not is_available():
        yield None
        return
    folder = MEMORY_FILE_SYSTEM / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_run_folder(path: Path) -> bool:
    """Return whether ``path`` is one that `shared_folder` may have made."""
    in_memory = path.parent == MEMORY_FILE_SYSTEM
    return in_memory and _FOLDER_NAME.fullmatch(path.name) is not None


def is_vector_file(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is one that `write_vector` may have made in a folder."""
    return path.parent == folder and _FILE_NAME.fullmatch(path.name) is not None


def write_vector(folder: Path, vector: Tensor) -> Path | None:
    """Write a float32 vector to a file in ``folder``; None without room for it."""
    # A file that was given back is reused first: allocating new memory takes longer.
    path = _claim(folder, vector.nbytes) or _new_path(folder, vector.nbytes)
    try:
        # Not truncated: that would give the memory back.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(vector.detach().contiguous().numpy().data)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    return path


def read_vector(path: Path) -> Tensor:
    """Return the float32 vector in ``path``; a copy, so the file may go at once."""
    with path.open("rb") as file:
        vector = torch.empty(os.fstat(file.fileno()).st_size // 4)
        file.readinto(vector.numpy().data)
    return vector


def recycle(path: Path) -> None:
    """Free the memory of the discarded ``path`` for the next vector of its size."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_suffix(_FREE))


def _claim(folder: Path, num_bytes: int) -> Path | None:
    """Return a free file of this size, which from now on belongs to the caller."""
    # It gets a new name, so that a reader of the old one never reads other numbers.
    for free in folder.glob(f"{num_bytes}-*{_FREE}"):
        path = _new_path(folder, num_bytes)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            free.rename(path)
            return path
    return None


def _new_path(folder: Path, num_bytes: int) -> Path:
    return folder / f"{num_bytes}-{uuid.uuid4().hex}{_IN_USE}"
