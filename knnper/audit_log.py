"""Append-only audit logs, chained by hashes.

A line is a JSON object with the number of the entry, its time, the event, the hash of
the line before (``previous``), and at its end its own ``hash``: the SHA-256 of the line
without this field. A changed, removed or moved line breaks the chain. A process that
may write the file can also rebuild the whole chain, or cut off its end. Only a head
that was noted elsewhere reveals this.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.errors import RunError
from knnper.files import (
    FileLock,
    JsonLines,
    make_private,
    open_plain,
    parse_json,
    sync_to_disc,
)
from knnper.reasons import Code, SafeReason

AUDIT_LOG = "audit.jsonl"  # in the state folder of a site, or of a server
NO_HASH = 64 * "0"  # `previous` of the first entry
_END = re.compile(rb', "hash": "([0-9a-f]{64})"\}\Z')

Recorder = Callable[..., object]
"""Records an event and its details, as `AuditLog.append` does."""


class AuditLogError(RunError):
    """An audit log was changed or damaged, or lacks an expected head."""

    reasons = (SafeReason(Code.UNUSABLE_STATE),)


def record_nothing(event: str, **details: object) -> None:
    """Do nothing: the `Recorder` where no log is kept."""


@dataclass(frozen=True)
class AuditLog:
    """A file of entries, one a line; any number of processes may append."""

    path: Path

    @classmethod
    def of(cls, state: Path) -> "AuditLog":
        """Return the log of a state folder."""
        return cls(state / AUDIT_LOG)

    def append(self, event: str, **details: object) -> str:
        """Add an entry, and return its hash; on return it is on disk.

        Call it before the change that it records: then a killed process leaves no
        change without an entry.

        Raises
        ------
        AuditLogError
            The last line is damaged.
        """
        make_private(self.path.parent)
        with FileLock(self.path.with_suffix(".lock"), wait=True):
            number, previous = self._last_entry()
            record = {
                "number": number + 1,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "event": event,
                **to_jsonable_python(details),
                "previous": previous,
            }
            digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
            JsonLines(self.path).append({**record, "hash": digest})
            if number == 0:
                sync_to_disc(self.path.parent)
        return digest

    def entries(self, expect_head: str = NO_HASH) -> Iterator[Mapping[str, Any]]:
        """Yield all entries, oldest first, and check the chain to its end.

        An incomplete last line is left out: a process was killed while it wrote. The
        next entry replaces this line.

        Parameters
        ----------
        expect_head
            A head that was noted earlier: an entry must have this hash.

        Raises
        ------
        AuditLogError
            At the first line that was altered, removed or moved; or, at the end, if no
            entry has the expected head.
        """
        number, head = 0, NO_HASH
        has_head = expect_head == NO_HASH
        for number, line in enumerate(self._whole_lines(), 1):
            entry = self._parse(line, number)
            if (entry.get("number"), entry.get("previous")) != (number, head):
                raise self._broken(
                    number,
                    f"found entry {entry.get('number')}, expected entry {number} with "
                    "the hash of the line before; lines were replaced, removed, added "
                    "or moved",
                )
            head = entry["hash"]
            has_head = has_head or head == expect_head
            yield entry
        if not has_head:
            raise AuditLogError(
                f"{self.path}: none of {number} entries has the expected head "
                f"{expect_head}; its last entries were removed, or the whole log "
                "was rewritten"
            )

    def _whole_lines(self) -> Iterator[bytes]:
        if self.path.exists():
            with open_plain(self.path) as file:
                yield from (line for line in file if line.endswith(b"\n"))

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        """Parse a whole line, and check it against its own hash."""
        text = line.removesuffix(b"\n")
        record, digest = _END.sub(b"}", text), _END.findall(text)
        if digest != [hashlib.sha256(record).hexdigest().encode()]:
            raise self._broken(number, "its text does not have its hash")
        entry: dict[str, Any] = parse_json(text)
        return entry

    def _broken(self, number: int, problem: str) -> AuditLogError:
        return AuditLogError(f"line {number} of {self.path} was changed: {problem}")

    def _last_entry(self) -> tuple[int, str]:
        """Return number and hash of the last whole line; 0 and `NO_HASH` if none."""
        # An empty file cannot be mapped.
        if not self.path.exists() or not self.path.stat().st_size:
            return 0, NO_HASH
        with (
            open_plain(self.path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            # The text after the last line end was cut off by a kill.
            end = content.rfind(b"\n")
            if end < 0:
                return 0, NO_HASH
            line = content[content.rfind(b"\n", 0, end) + 1 : end]
        try:
            entry = self._parse(line, 0)
        except AuditLogError as error:
            raise AuditLogError(
                f"the last line of {self.path} was changed or damaged, so nothing can "
                "be added to it. Keep the file as evidence: move it elsewhere, and a "
                "new log begins"
            ) from error
        return entry["number"], entry["hash"]
