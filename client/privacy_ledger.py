"""The ledger of a site's privacy: every protected update, on the site's own disk.

An update is recorded before it leaves, so a kill can waste privacy but never hide any.
The lines of ``privacy.jsonl`` are chained by hashes, and ``privacy.head`` has the hash
of the last. Together they show a line that was changed or removed. Two old files, as of
a backup, are not recognised.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from knnper.audit_log import NO_HASH, AuditLog, AuditLogError
from knnper.files import FileLock, make_private, read_plain, write_atomically
from knnper.reasons import SafeReason

LEDGER, HEAD, LOCK = "privacy.jsonl", "privacy.head", "privacy.spending.lock"
_EVENT = "update"


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

Objections = Callable[[Sequence[ProtectedUpdate]], list[SafeReason]]
"""Returns why no update may follow these."""


@dataclass(frozen=True)
class PrivacyLedger:
    """The record of a site's protected updates, in its state folder.

    Raises
    ------
    AuditLogError
        If the files are damaged, or lines are missing.
    """

    state: Path

    def read(self) -> list[ProtectedUpdate]:
        """Read all updates, oldest first."""
        # In this order, so that a process that appends meanwhile does no harm.
        has_log = self._log.path.exists()
        head = read_plain(self._head).decode() if self._head.exists() else NO_HASH
        try:
            if has_log and not self._head.exists():
                raise AuditLogError(f"there is no {HEAD}")
            return _UPDATES.validate_python(list(self._log.entries(head)))
        except (AuditLogError, ValidationError) as error:
            raise AuditLogError(
                f"the ledger {self._log.path} cannot be trusted: {error}. Restore it "
                f"and {HEAD} from their newest copies; or remove both, and no update "
                "sent so far counts any more"
            ) from error

    def append(
        self, update: ProtectedUpdate, objections: Objections
    ) -> list[SafeReason]:
        """Record an update; on return it is on disk.

        Return the objections to an update after those so far; if there are any, it is
        not recorded.
        """
        make_private(self.state)
        # Locked, so that two processes cannot both spend the last ε.
        with FileLock(self.state / LOCK, wait=True):
            reasons = objections(self.read())
            if not reasons:
                if not self._head.exists():
                    write_atomically(self._head, NO_HASH)
                # A kill in between leaves a head that lacks the last line.
                head = self._log.append(_EVENT, **asdict(update))
                write_atomically(self._head, head)
        return reasons

    @property
    def _log(self) -> AuditLog:
        return AuditLog(self.state / LEDGER)

    @property
    def _head(self) -> Path:
        return self.state / HEAD
