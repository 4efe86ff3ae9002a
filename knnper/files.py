"""Files that are whole or not there, locks, and folders that others may have made."""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from knnper.errors import KnnPerError, RunError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
MOST_NESTED = 100  # levels of lists and mappings in a file that people write or send

UNFINISHED = ".unfinished"
"""How the name of a folder ends that is being made, or was when a process died."""

_ATTEMPTS, _PAUSE_S = 3, 0.02
"""Retries of a taken lock, since `lock_holder` takes it for an instant."""
_OTHERS = 0o077


class ForeignFileError(KnnPerError, OSError):
    """A link, pipe, socket or device is where a file or a folder is expected."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An OSError takes its arguments in __init__, which `KnnPerError` leaves out.
        return type(self), self.args, vars(self)


def require_plain(folder: Path, *, but: Collection[str] = ()) -> None:
    """Reject links, pipes, sockets and devices anywhere in a folder.

    Folders may come from others: a link would lead writes and deletions to other files,
    and a pipe would block the reader for ever. The folder itself may be reached by a
    link. The entries ``but`` are not checked.
    """
    for entry in _entries(folder):
        if entry.name not in but:
            _require_plain_entry(entry)


def _require_plain_entry(entry: "os.DirEntry[str]") -> None:
    if entry.is_dir(follow_symlinks=False):
        for inner in _entries(entry.path):
            _require_plain_entry(inner)
    elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
        raise ForeignFileError(_refusal(entry.path))


def _entries(folder: str | Path) -> "list[os.DirEntry[str]]":
    # Another process may have removed it; the root of a volume has folders that only
    # the system may read.
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):
        return []


def _refusal(path: str | Path) -> str:
    return (
        f"{path} is a link, a pipe or a device, expected a regular file or a folder: "
        "in a folder from elsewhere it can lead to any other file. Remove it, or "
        "replace it by a copy"
    )


def open_plain(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file as ``open`` does; refuse links, and wait for no pipe."""
    opened: IO[bytes] = open(path, mode, opener=_open_plain)  # noqa: SIM115 (the caller's)
    return opened


def _open_plain(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ForeignFileError(_refusal(path)) from error
        raise
    return _require_regular(descriptor, path)


def _require_regular(descriptor: int, path: str | Path) -> int:
    """Return the descriptor of a regular file; close any other and raise."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ForeignFileError(_refusal(path))


def read_plain(path: Path) -> bytes:
    """Return the content of a file; see `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def read_file(path: Path) -> bytes:
    """Return the content of a file, which may be reached by a link but not be a pipe.

    Pipes that a shell has opened, as in ``knnper simulate <(...)``, are read.
    """
    if path.parts[:2] in (("/", "dev"), ("/", "proc")):
        return path.read_bytes()

    def opener(name: str, flags: int) -> int:
        return _require_regular(os.open(name, flags | os.O_NONBLOCK), name)

    with open(path, "rb", opener=opener) as file:
        return file.read()


def parse_json(content: str | bytes) -> Any:
    """Parse JSON from a file, or from a peer.

    Raises
    ------
    ValueError
        It is no JSON, or nested more than `MOST_NESTED` levels deep: whatever goes
        through such a value by recursion would fail with a `RecursionError`.
    """
    too_deep = f"found values nested more than {MOST_NESTED} levels deep"
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [value]
    for _ in range(MOST_NESTED + 1):
        parts = (
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        )
        level = list(itertools.chain.from_iterable(parts))
        if not level:
            return value
    raise ValueError(too_deep)


def read_document(kind: type[T], path: Path, advice: str) -> T | None:
    """Return the dataclass that a file of JSON holds; None without the file."""
    try:
        document: T = TypeAdapter(kind).validate_json(read_plain(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(f"{path} is damaged; {advice}: {error}") from error
    return document


class LockHeldError(OSError):
    """Another process, which this names, or this one by another object, holds it."""


class FileLock:
    """A lock of one process, released however it ends; the file holds its id.

    A forked child neither keeps nor releases it. With ``wait`` it waits for a holder
    instead of raising `LockHeldError`.
    """

    # `flock`, and not the package filelock: that empties the file which names the
    # holder, and needs the right to write only to know whether it is held.

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self._file = open_plain(path, "a+b")
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
        # A forked process shares the lock, and would release it for its parent.
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
    """Return the id of the process that holds the lock in ``path``, or None.

    Nothing is written, and the holder is not disturbed.
    """
    if not path.is_file():
        return None
    with open_plain(path) as file:
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
    """Replace the content of ``path``; readers see either the old or the new content.

    The folder must exist. Text is written as UTF-8. On return it is on disk.
    """
    with written_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes the content of ``path`` after the block.

    As with `write_atomically`; after an error in the block nothing has changed.
    """
    draft = draft_of(path)
    # Remove the draft of a killed process; a link would be written through.
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    try:
        with draft.open("xb") as file:
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
    """Return the path of the draft that a killed `write_atomically` leaves behind."""
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
        with open_plain(self.path, "ab") as file:
            if self._ends_torn():
                file.truncate(read_plain(self.path).rfind(b"\n") + 1)
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
        with open_plain(self.path) as file:
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
        with open_plain(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read(1) not in (b"", b"\n")

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        cause = None
        try:
            record = parse_json(line)
        except ValueError as error:
            record, cause = None, error
        if not isinstance(record, dict):
            raise RunError(
                f"line {number} of {self.path} is damaged; expected one JSON object a "
                "line. Remove the line, or start the run again in another folder"
            ) from cause
        return record


def make_private(folder: Path) -> None:
    """Create a folder for this user alone; remove others' rights to an old one."""
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
