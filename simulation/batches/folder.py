"""The folder of a sweep or a comparison, which belongs to one batch and one process."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from knnper.errors import FolderTakenError, RunError
from knnper.files import draft_of, read_document, require_plain, write_atomically
from knnper.server.run_folder import LOCK, RunFolder

BATCH = ".batch.json"  # the identity of the batch
RUNS = "runs"  # the folder of its runs' folders


@dataclass(frozen=True)
class BatchIdentity:
    """The identity of a batch.

    Attributes
    ----------
    kind
        ``sweep`` or ``comparison``.
    name
        The ``name`` in its file.
    """

    kind: str
    name: str


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder of runs and lock it against other processes inside the block."""
    _require_no_file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunFolder(folder).locked())
        except RunError as error:
            raise RunError(
                f"another process is at work in {folder}; wait for it, or end it first "
                "(Ctrl-C where it was started). The same command continues"
            ) from error
        yield


@contextlib.contextmanager
def batch_folder(folder: Path, identity: BatchIdentity) -> Iterator[None]:
    """Create the folder of a batch and lock it inside the block.

    Raises FolderTakenError if the folder holds anything else, before anything is
    written.
    """
    _require_no_file(folder)
    _require_own(folder, identity)
    with locked_folder(folder):
        _require_own(folder, identity)  # another process may have been faster
        if not (folder / BATCH).is_file():
            text = json.dumps(asdict(identity), indent=2)
            write_atomically(folder / BATCH, f"{text}\n")
        yield


def _require_no_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FolderTakenError(
            f"{folder} is a file, expected a folder for the runs; choose another with "
            "--output"
        )


def _require_own(folder: Path, identity: BatchIdentity) -> None:
    """Reject a folder of another batch, or with other content; accept an empty one."""
    require_plain(folder)
    fix = "delete the file if the runs are those of this batch"
    recorded = read_document(BatchIdentity, folder / BATCH, fix)
    if recorded is None:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if not names <= {LOCK, draft_of(folder / BATCH).name, RUNS}:
            raise FolderTakenError(
                f"{folder} is not empty and holds no runs of a {identity.kind}; choose "
                "another folder with --output"
            )
    elif recorded != identity:
        raise FolderTakenError(
            f"{folder} holds the {recorded.kind} {recorded.name}, expected the "
            f"{identity.kind} {identity.name}; choose another folder with --output, or "
            "delete this one"
        )
