"""Arrays as files in memory that all processes of one machine can map."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEMORY_FILE_SYSTEM = Path("/dev/shm")
_PREFIX = "knnper-"
# A container's default of 64 MB would fill up in the middle of a round.
_LEAST_FREE_BYTES = 256 * 1024**2


def is_available() -> bool:
    """Return whether this machine has a file system in memory with room to spare."""
    if not os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        return False
    _remove_left_behind()
    return shutil.disk_usage(MEMORY_FILE_SYSTEM).free >= _LEAST_FREE_BYTES


@contextlib.contextmanager
def shared_folder() -> Iterator[Path | None]:
    """Create a folder in memory for one run and remove it afterwards.

    Yields None where there is no room for one. Folders of runs that were killed are
    removed first: memory is not given back by a reboot that never comes.
    """
    if not is_available():
        yield None
        return
    folder = MEMORY_FILE_SYSTEM / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_vector(folder: Path, vector: Tensor) -> Path | None:
    """Write a float32 vector to a new file in ``folder`` and return its path.

    Returns None, and leaves nothing, where the file system has no room left.
    """
    path = folder / f"{uuid.uuid4().hex}.f32"
    try:
        with path.open("wb") as file:
            file.write(vector.detach().contiguous().numpy().data)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    return path


def read_vector(path: Path) -> Tensor:
    """Return the float32 vector in ``path``; a copy, so the file may go at once."""
    return torch.from_numpy(np.fromfile(path, dtype=np.float32))


def _remove_left_behind() -> None:
    for folder in MEMORY_FILE_SYSTEM.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
