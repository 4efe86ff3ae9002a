"""The folder of a batch, in which one process at a time is at work."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from knnper.config.errors import FolderTakenError
from server.run_folder import RunFolder


@contextlib.contextmanager
def led(folder: Path) -> Iterator[None]:
    """Make the folder of a batch; keep other processes out of it inside the block.

    Raises
    ------
    FolderTakenError
        If it is a file.
    RunError
        If another process is at work in it.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderTakenError(
            f"{folder} is a file, expected a folder for the runs; choose another with "
            "--output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        yield
