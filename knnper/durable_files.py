"""Files that are whole at any time, also after a kill."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.config.errors import RunError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Make ``content`` that of ``path``: readers see the old or the new content.

    The folder must exist. Text is written as UTF-8. On return it is on disk.
    """
    draft = draft_of(path)
    try:
        _write(draft, content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except BaseException:
        # What stays makes the folder one that is not empty.
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """Return what `write_atomically` leaves of ``path`` where it is killed."""
    return path.with_name(f".{path.name}.draft")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the folder's list of names to disk; renaming alone does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON objects, one a line, that grows at its end.

    A kill may leave the last line torn; such a line was never acknowledged and is
    dropped.

    Attributes
    ----------
    path
        The file; it need not exist.
    """

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one more line; on return it is on disk."""
        line = json.dumps(record).encode() + b"\n"
        with self.path.open("ab") as file:
            if self._ends_torn():
                file.truncate(len(self._whole_lines()))
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all records, oldest first; none without a file.

        Raises
        ------
        RunError
            If a line before the last one is no JSON object.
        """
        return [
            self._parse(line, number)
            for number, line in enumerate(self._whole_lines().splitlines(), start=1)
        ]

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Make ``records`` the only content, atomically."""
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        write_atomically(self.path, text)

    def _ends_torn(self) -> bool:
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read(1) not in (b"", b"\n")

    def _whole_lines(self) -> bytes:
        if not self.path.exists():
            return b""
        content = self.path.read_bytes()
        return content[: content.rfind(b"\n") + 1]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise self._damaged(number) from error
        if not isinstance(record, dict):
            raise self._damaged(number)
        return record

    def _damaged(self, number: int) -> RunError:
        return RunError(
            f"line {number} of {self.path} is damaged; expected one JSON object a "
            "line. Remove the line, or start the run again in another folder"
        )
