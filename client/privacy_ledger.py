"""The ledger of a site's privacy: every protected update, on the site's own disk.

An update is recorded before it leaves, so a kill can waste privacy but never hide any.
The lines of ``privacy.jsonl`` are chained by hashes, and ``privacy.head`` has the hash
of the last. Together they show a line that was changed or removed. Two old files, as of
a backup, are not recognised.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import AwareDatetime, TypeAdapter

from knnper.audit_log import NO_HASH, AuditLog, AuditLogError
from knnper.files import FileLock, make_private, read_plain, write_atomically

LEDGER, HEAD, LOCK = "privacy.jsonl", "privacy.head", "privacy.spending.lock"
_EVENT = "update"


@dataclass(frozen=True)
class ProtectedUpdate:
    """An update that was sent, or was about to be.

    Attributes
    ----------
    experiment, server_round
        The experiment's fingerprint and the round.
    noise_multiplier
        σ of `SitePrivacySettings`, as it was applied.
    """

    time: AwareDatetime
    experiment: str
    server_round: int
    noise_multiplier: float


_UPDATES = TypeAdapter(list[ProtectedUpdate])


def spending_lock(state: Path) -> FileLock:
    """Wait for the lock of a state folder's ledger, and take it."""
    make_private(state)
    return FileLock(state / LOCK, wait=True)


def read_updates(state: Path) -> list[ProtectedUpdate]:
    """Read all updates in a state folder, oldest first.

    Raises
    ------
    AuditLogError
        If the files are damaged, or lines are missing.
    """
    log, head = AuditLog(state / LEDGER), state / HEAD
    # The log first: a process that begins a ledger writes the head before it.
    has_log = log.path.exists()
    try:
        is_begun = has_log or head.exists()
        expected = read_plain(head).decode() if is_begun else NO_HASH
        return _UPDATES.validate_python(list(log.entries(expected)))
    except (AuditLogError, FileNotFoundError, ValueError) as error:
        raise AuditLogError(
            f"the ledger {log.path} cannot be trusted: {error}. Restore it and {HEAD} "
            "from their newest copies; or remove both, and no update sent so far "
            "counts any more"
        ) from error


def record_update(state: Path, update: ProtectedUpdate) -> None:
    """Record an update, with the `spending_lock`; on return it is on disk."""
    head = state / HEAD
    if not head.exists():
        write_atomically(head, NO_HASH)
    # A kill in between leaves a head that lacks the last line.
    write_atomically(head, AuditLog(state / LEDGER).append(_EVENT, **asdict(update)))
