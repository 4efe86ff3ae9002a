"""The ledger of a site's privacy: every protected update, on the site's own disk.

An update is recorded before it leaves, so a kill can waste privacy but never hide any.
``privacy.jsonl`` has one line for each update, chained by digests, and
``privacy.head.json`` the number of lines and the last digest. Together they show a line
that was changed or removed. Two old files, as of a backup, are not recognised.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from knnper.errors import RunError
from knnper.files import (
    FileLock,
    JsonLines,
    make_private,
    read_document,
    write_atomically,
)
from knnper.privacy import Release
from knnper.reasons import Code, SafeReason

LEDGER, HEAD, LOCK = "privacy.jsonl", "privacy.head.json", "privacy.lock"
YEAR = timedelta(days=365)
_DIGEST = "digest"


@dataclass(frozen=True)
class ProtectedUpdate:
    """An update with noise that was sent, or was about to be.

    Attributes
    ----------
    run, experiment, server_round
        Flower's number of the run, the experiment's fingerprint and the round.
    clip_norm, noise_multiplier
        S and σ of `SitePrivacySettings`, as they were applied.
    """

    time: AwareDatetime
    run: int
    experiment: str
    server_round: int
    clip_norm: float
    noise_multiplier: float


@dataclass(frozen=True)
class _Head:
    """The number of lines in the ledger and the digest of the last."""

    count: int
    digest: str


_UPDATE = TypeAdapter(ProtectedUpdate)


@dataclass(frozen=True)
class PrivacyLedger:
    """The record of a site's protected updates, in its state folder.

    Raises
    ------
    RunError
        If the files are damaged, or lines are missing.
    """

    state: Path

    def read(self) -> list[ProtectedUpdate]:
        """Read all updates, oldest first."""
        if not (self._lines.path.exists() or self._head.exists()):
            return []
        with self.locked():
            return self.read_locked()

    def locked(self) -> FileLock:
        """Wait until no other process reads or writes the ledger, and keep it so."""
        make_private(self.state)
        return FileLock(self.state / LOCK, wait=True)

    def read_locked(self) -> list[ProtectedUpdate]:
        """Read all updates while `locked`."""
        return [_UPDATE.validate_python(line) for line in self._checked_lines()]

    def append_locked(self, update: ProtectedUpdate) -> None:
        """Record an update while `locked`; on return it is on disk."""
        lines = self._checked_lines()
        previous = lines[-1][_DIGEST] if lines else ""
        # The head is one line behind after a kill, and must not fall further behind.
        self._write_head(len(lines), previous)
        line = {**asdict(update), "time": update.time.isoformat()}
        digest = _digest(previous, line)
        self._lines.append({**line, _DIGEST: digest})
        self._write_head(len(lines) + 1, digest)

    def _write_head(self, count: int, digest: str) -> None:
        head = _Head(count, digest)
        if head != self._read_head():
            write_atomically(self._head, json.dumps(asdict(head)))

    def _read_head(self) -> _Head:
        head = read_document(_Head, self._head, "it cannot be trusted")
        return head or _Head(0, "")

    def _checked_lines(self) -> list[dict[str, Any]]:
        try:
            lines = self._lines.read()
            head = self._read_head()
        except RunError as error:
            raise self._damaged("a file is damaged") from error
        previous = ""
        for number, line in enumerate(lines, start=1):
            if not _is_line(line, previous):
                raise self._damaged(f"line {number} was changed or removed")
            previous = line[_DIGEST]
        digests = ["", *(line[_DIGEST] for line in lines)]
        num_new = len(lines) - head.count
        if num_new not in (0, 1) or digests[head.count] != head.digest:
            raise self._damaged(
                f"found {len(lines)} lines, expected {head.count}, the last with the "
                "digest of the head"
            )
        return lines

    def _damaged(self, problem: str) -> RunError:
        return RunError(
            f"the ledger {self._lines.path} cannot be trusted: {problem}. Restore it "
            f"and {HEAD} from their newest copies; or remove both, and no update sent "
            "so far counts any more",
            reason=SafeReason(Code.UNUSABLE_STATE),
        )

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.state / LEDGER)

    @property
    def _head(self) -> Path:
        return self.state / HEAD


def releases_of(updates: Iterable[ProtectedUpdate]) -> list[Release]:
    """Return updates as releases, for `knnper.privacy.epsilon_of`.

    Without amplification by sampling: the server chooses who takes part.
    """
    counts = Counter(update.noise_multiplier for update in updates)
    return [site_release(noise, count) for noise, count in sorted(counts.items())]


def site_release(noise_multiplier: float, count: int = 1) -> Release:
    """Return releases of a site's updates with noise of σ S.

    Two data sets move the clipped update by up to 2 S, twice what a unit adds to a sum.
    """
    return Release(noise_multiplier / 2, count=count)


def of_experiment(
    updates: Sequence[ProtectedUpdate], experiment: str
) -> list[ProtectedUpdate]:
    """Return the updates of an experiment, in all its runs."""
    return [update for update in updates if update.experiment == experiment]


def of_last_year(updates: Sequence[ProtectedUpdate]) -> list[ProtectedUpdate]:
    """Return the updates of the last 365 days."""
    begin = datetime.now(UTC) - YEAR
    return [update for update in updates if update.time > begin]


def _is_line(line: dict[str, Any], previous: str) -> bool:
    fields = {name: value for name, value in line.items() if name != _DIGEST}
    try:
        _UPDATE.validate_python(fields)
    except ValidationError:
        return False
    return line.get(_DIGEST) == _digest(previous, fields)


def _digest(previous: str, line: dict[str, Any]) -> str:
    text = json.dumps([previous, line], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
