"""The ledger of a site's privacy: every protected update, on the site's own disk.

An update is recorded before it leaves, so a kill can waste privacy but never hide any.
The lines of ``privacy.jsonl`` are chained by hashes, and ``privacy.head`` has the hash
of the last. Together they show a line that was changed or removed. Two old files, as of
a backup, are not recognised.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from knnper.audit_log import AuditLog, AuditLogError, VerifiedLog
from knnper.errors import RunError
from knnper.files import FileLock, make_private, read_plain, write_atomically
from knnper.privacy import Release
from knnper.reasons import Code, SafeReason

LEDGER, HEAD, LOCK = "privacy.jsonl", "privacy.head", "privacy.spending.lock"
_EVENT = "update"
_ALL = 10**9


@dataclass(frozen=True)
class ProtectedUpdate:
    """An update that was sent, or was about to be.

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


_UPDATES = TypeAdapter(list[ProtectedUpdate])
_FIELDS = tuple(field.name for field in fields(ProtectedUpdate))


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
        if not (self._log.path.exists() or self._head.exists()):
            return []
        with self.locked():
            return self.read_locked()

    def locked(self) -> FileLock:
        """Wait until no other process reads or writes the ledger, and keep it so."""
        make_private(self.state)
        return FileLock(self.state / LOCK, wait=True)

    def read_locked(self) -> list[ProtectedUpdate]:
        """Read all updates while `locked`."""
        entries = self._verified().last
        try:
            return _UPDATES.validate_python(
                [{name: entry[name] for name in _FIELDS} for entry in entries]
            )
        except (KeyError, ValidationError) as error:
            raise self._damaged("an entry is no update") from error

    def append_locked(self, update: ProtectedUpdate) -> None:
        """Record an update while `locked`; on return it is on disk."""
        # The head lacks one line after a kill, and must not lack two.
        self._write_head()
        self._log.append(_EVENT, **asdict(update))
        self._write_head()

    def _write_head(self) -> None:
        verified = self._verified()
        if verified.num_entries and verified.head != self._read_head():
            write_atomically(self._head, verified.head)

    def _read_head(self) -> str:
        return read_plain(self._head).decode() if self._head.exists() else ""

    def _verified(self) -> VerifiedLog:
        head = self._read_head()
        try:
            verified = self._log.verify(head, num_last=_ALL)
        except AuditLogError as error:
            raise self._damaged(str(error)) from error
        if not head and verified.num_entries > 1:
            raise self._damaged(f"there is no {HEAD}")
        return verified

    def _damaged(self, problem: str) -> RunError:
        return RunError(
            f"the ledger {self._log.path} cannot be trusted: {problem}. Restore it "
            f"and {HEAD} from their newest copies; or remove both, and no update sent "
            "so far counts any more",
            reason=SafeReason(Code.UNUSABLE_STATE),
        )

    @property
    def _log(self) -> AuditLog:
        return AuditLog(self.state / LEDGER)

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
