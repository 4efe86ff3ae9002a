"""Whether a store is what was written: everything that can be checked."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from datastore.care.file_checks import check_files, check_index
from datastore.care.finding import Finding
from datastore.care.row_checks import DatabaseCheck
from datastore.care.salvage import Salvage, what_is_intact
from datastore.errors import StoreDamagedError, StoreError, to_restore
from datastore.folder import DATABASE, open_rows
from datastore.sqlite.raw import opened


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.

    Attributes
    ----------
    findings
        What is wrong; nothing in a sound store.
    num_examples
        N, the stored examples.
    num_rows
        Inputs, and embeddings of all versions, that were compared with checksums.
    saving
        What `salvage` would save of a damaged database; None of a sound one, or where
        that cannot be told.
    """

    findings: tuple[Finding, ...]
    num_examples: int = 0
    num_rows: int = 0
    saving: Salvage | None = None


def verify(folder: Path) -> Verdict:
    """Check the database, all checksums, labels, embeddings, the saved index, files.

    Nothing is changed; other processes may use the store meanwhile. The index is
    compared with the database only where that is sound.

    Raises
    ------
    StoreError
        If there is no store.
    """
    verdict = _verdict(folder)
    return replace(verdict, findings=(*verdict.findings, *check_files(folder)))


def _verdict(folder: Path) -> Verdict:
    try:
        with (
            open_rows(folder) as (identity, rows),
            opened(folder / DATABASE) as connection,
        ):
            connection.execute("BEGIN")
            check = DatabaseCheck(folder, identity.spec, connection, rows)
            findings = tuple(check.findings())
            counted = check.num_examples(), check.num_rows()
            connection.execute("ROLLBACK")
            if not findings:
                other = (*check.erasure(), *check_index(folder, identity, rows))
                return Verdict(other, *counted)
    except StoreDamagedError as error:
        findings, counted = (
            (Finding(error.found or str(error), to_restore(folder)),),
            (0, 0),
        )
    return Verdict(findings, *counted, _saving(folder))


def _saving(folder: Path) -> Salvage | None:
    # Somebody may write, TMPDIR be full, or nothing be left.
    with contextlib.suppress(StoreError, OSError):
        return what_is_intact(folder)
    return None
