"""The folder of a batch, in which one process at a time is at work."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from knnper.config.errors import FolderTakenError, RunError
from knnper.durable_files import draft_of, write_atomically
from server.run_folder import RunFolder
from server.run_marks import LOCK

BATCH = ".batch.json"
"""In a batch's folder: what it is."""

RUNS = "runs"
"""In a batch's folder: the folders of its runs."""

TABLE = "table.md"
"""In a batch's folder: the table for people."""

_RUN = re.compile(r"[0-9a-f]{16}")
"""What names a run's folder, see `simulation.batch.families.key_of`."""


@dataclass(frozen=True)
class Identity:
    """What tells a batch from others.

    Attributes
    ----------
    kind
        What people call it, as in ``sweep``.
    name
        In its file.
    """

    kind: str
    name: str


_DOCUMENT = TypeAdapter(Identity)


@contextlib.contextmanager
def led(folder: Path) -> Iterator[None]:
    """Make a folder of runs; keep other processes out of it inside the block.

    Raises
    ------
    FolderTakenError
        If it is a file.
    RunError
        If another process is at work in it.
    """
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
    """Make the folder of one batch; keep other processes out of it inside the block.

    Raises
    ------
    FolderTakenError
        If it is a file, or holds another batch or something else.
    RunError
        If another process is at work in it, or what tells which batch it holds is
        damaged.
    """
    _require_no_file(folder)
    # Before anything is written there.
    _require_own(folder, identity)
    with led(folder):
        _require_own(folder, identity)
        if not (folder / BATCH).is_file():
            text = _DOCUMENT.dump_json(identity, indent=2)
            write_atomically(folder / BATCH, text + b"\n")
        yield


def _require_no_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FolderTakenError(
            f"{folder} is a file, expected a folder for the runs; choose another with "
            "--output"
        )


def _require_own(folder: Path, identity: Identity) -> None:
    """Refuse a folder that holds another batch or none, but take an empty one."""
    found = _read(folder / BATCH)
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


def _read(path: Path) -> Identity | None:
    if not path.is_file():
        return None
    try:
        return _DOCUMENT.validate_json(path.read_bytes())
    except ValidationError as error:
        expected = ", ".join(asdict(Identity("sweep", "NAME")))
        raise RunError(
            f"{path} is damaged, expected {expected} of the batch in this folder; "
            "delete the file if the runs are those of this one"
        ) from error


def _may_be_taken(folder: Path) -> bool:
    """Return whether a folder without a name is empty, or one of earlier versions."""
    if not folder.exists():
        return True
    names = {path.name for path in folder.iterdir()}
    if names <= {LOCK, draft_of(folder / BATCH).name, RUNS}:
        return True
    # All runs of it may have been deleted.
    if {LOCK, TABLE} <= names:
        return True
    runs = folder / RUNS
    return runs.is_dir() and any(_RUN.fullmatch(run.name) for run in runs.iterdir())
