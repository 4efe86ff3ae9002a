"""Files that are whole or not there, and locks between processes."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from knnper.errors import RunError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

UNFINISHED = ".unfinished"
"""How the name of a folder ends that is being made, or was when a process died."""


def read_if_sound(entry: Path, read: Callable[[Path], T]) -> T | None:
    """Return what ``read`` makes of ``entry``; None where it is missing or damaged."""
    if not entry.exists():
        return None
    try:
        return read(entry)
    except (OSError, ValueError, EOFError, KeyError) as error:
        _LOG.warning("%s is damaged (%s) and will be decoded again", entry, error)
        return None


def make_entry(entry: Path, fill: Callable[[Path], None]) -> None:
    """Make ``entry`` in place of what is there; only the holder of the lock may."""
    unfinished = entry.with_name(f"{entry.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        fill(unfinished)
        shutil.rmtree(entry, ignore_errors=True)
        unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_to_disc(entry.parent)


def read_document(kind: type[T], path: Path, mend: str) -> T | None:
    """Return the dataclass that a file of JSON holds; None without the file."""
    try:
        found: T = TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(f"{path} is damaged; {mend}: {error}") from error
    return found


_ATTEMPTS, _PAUSE_S = 3, 0.02
"""How often a taken lock is tried again: `lock_holder` has it for an instant."""


class LockHeldError(OSError):
    """Another process, which this names, or this one by another object, holds it."""


class FileLock:
    """Held by one process, which the file names; gone with it, however that ends.

    A process that is forked meanwhile neither keeps nor releases it. With ``wait`` it
    waits for a holder instead of raising `LockHeldError`.
    """

    # `flock`, and not the package filelock: that empties the file which names the
    # holder, and needs the right to write only to know whether it is held.

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self._file = path.open("a+b")
        self._process = os.getpid()
        if wait:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        elif not self._taken():
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace") or "unknown"
            self._file.close()
            raise LockHeldError(holder)
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others have it, also where a forked process has the file open."""
        # A forked process shares the lock, and would take it from the one it is of.
        if self._process == os.getpid():
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _taken(self) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_PAUSE_S if attempt < _ATTEMPTS - 1 else 0)
            else:
                return True
        return False


def lock_holder(path: Path) -> str | None:
    """Return the process id of who holds the lock in ``path``; None if nobody does.

    Nothing is written; who holds it notices nothing.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().decode(errors="replace") or "unknown"
    return None


def sync_to_disc(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disc."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Make ``content`` that of ``path``: readers see the old or the new content.

    The folder must exist. Text is written as UTF-8. On return it is on disk.
    """
    with written_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file whose content is that of ``path`` after the block.

    As with `write_atomically`; after an error in the block nothing has changed.
    """
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
        sync_to_disc(draft)
        draft.replace(path)
    except BaseException:
        # What stays makes the folder one that is not empty.
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_to_disc(path.parent)


def draft_of(path: Path) -> Path:
    """Return what `write_atomically` leaves of ``path`` where it is killed."""
    return path.with_name(f".{path.name}.draft")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to be filled, which becomes ``folder`` if nothing fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir()
        yield draft
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_to_disc(folder.parent)


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON objects, one a line, that grows at its end."""

    path: Path

    def append(self, *records: Mapping[str, Any]) -> None:
        """Write more lines; on return they are on disk."""
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with self.path.open("ab") as file:
            if self._ends_torn():
                file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all records, oldest first; none without a file."""
        return [record for _, record in self.placed()]

    def placed(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each record with where its line begins, oldest first."""
        if not self.path.exists():
            return
        place = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield place, self._parse(line, number)
                place += len(line)

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Make ``records`` the only content, atomically."""
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        write_atomically(self.path, text)

    def _ends_torn(self) -> bool:
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read(1) not in (b"", b"\n")

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        cause = None
        try:
            record = json.loads(line)
        except ValueError as error:
            record, cause = None, error
        if not isinstance(record, dict):
            raise RunError(
                f"line {number} of {self.path} is damaged; expected one JSON object a "
                "line. Remove the line, or start the run again in another folder"
            ) from cause
        return record


_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Make a folder for this user alone; take others' rights from one that is there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if is_private(folder) or status.st_uid != os.geteuid():
        return
    mode = stat.S_IMODE(status.st_mode)
    folder.chmod(mode & ~_OTHERS)
    message = "%s could be looked into by other users (mode %04o); now it cannot"
    _LOG.warning(message, folder, mode)


def is_private(folder: Path) -> bool:
    """Return whether no other user can look into a folder."""
    return stat.S_IMODE(folder.stat().st_mode) & _OTHERS == 0
