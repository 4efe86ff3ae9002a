"""The folder of a run or a batch: with which code and data it was begun."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from knnper.errors import FolderTakenError, RunError
from knnper.files import draft_of, read_document, require_plain, write_atomically
from knnper.server.run_folder import LOCK, RunFolder

BATCH = ".batch.json"  # in a batch's folder: what it is
RUNS = "runs"  # in a batch's folder: the folders of its runs
TABLE = "table.md"  # in a batch's folder: the table for people


@dataclass(frozen=True)
class Identity:
    """What tells a batch from others."""

    kind: str  # what people call it, as in ``sweep``
    name: str  # in its file


@contextlib.contextmanager
def led(folder: Path) -> Iterator[None]:
    """Make a folder of runs; keep other processes out of it inside the block."""
    _require_no_file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunFolder(folder).locked())
        except RunError as error:
            raise RunError(
                f"another process is at work in {folder}; wait for it, or end it first "
                "(Ctrl-C where it was started). The same command goes on with what is "
                "done"
            ) from error
        yield


@contextlib.contextmanager
def batch_folder(folder: Path, identity: Identity) -> Iterator[None]:
    """Make the folder of one batch; keep other processes out of it inside the block."""
    _require_no_file(folder)
    # Before anything is written there.
    _require_own(folder, identity)
    with led(folder):
        _require_own(folder, identity)
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


def _require_own(folder: Path, identity: Identity) -> None:
    """Refuse a folder that holds another batch or none, but take an empty one."""
    require_plain(folder)
    mend = "delete the file if the runs are those of this batch"
    found = read_document(Identity, folder / BATCH, mend)
    if found is None:
        if not _may_be_taken(folder):
            raise FolderTakenError(
                f"{folder} is not empty and holds no runs of a {identity.kind}; choose "
                "another folder with --output"
            )
    elif found != identity:
        raise FolderTakenError(
            f"{folder} holds the {found.kind} {found.name}, expected the "
            f"{identity.kind} {identity.name}; choose another folder with --output, or "
            "delete this one"
        )


def _may_be_taken(folder: Path) -> bool:
    """Return whether a folder does not exist, or has nothing but an empty batch."""
    if not folder.exists():
        return True
    names = {path.name for path in folder.iterdir()}
    return names <= {LOCK, draft_of(folder / BATCH).name, RUNS}
