"""Whether a store is what was written: everything that can be checked."""

from dataclasses import dataclass
from pathlib import Path

from datastore.care.file_checks import check_files, check_index
from datastore.care.finding import Finding
from datastore.care.row_checks import DatabaseCheck, to_restore
from datastore.errors import StoreDamagedError
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
    """

    findings: tuple[Finding, ...]
    num_examples: int = 0
    num_rows: int = 0


def verify(folder: Path) -> Verdict:
    """Check the database, all checksums, labels, embeddings, the saved index, files.

    Nothing is changed; other processes may use the store meanwhile. The index is
    compared with the database only where that is sound.

    Raises
    ------
    StoreError
        If there is no store.
    """
    try:
        verdict = _verdict(folder)
    except StoreDamagedError as error:
        verdict = Verdict((Finding(str(error), to_restore(folder)),))
    strays = tuple(check_files(folder))
    return Verdict((*verdict.findings, *strays), verdict.num_examples, verdict.num_rows)


def _verdict(folder: Path) -> Verdict:
    with open_rows(folder) as (identity, rows), opened(folder / DATABASE) as connection:
        connection.execute("BEGIN")
        check = DatabaseCheck(folder, identity.spec, connection, rows)
        findings = list(check.findings())
        counted = check.num_examples(), check.num_rows()
        connection.execute("ROLLBACK")
        if not findings:
            findings += check_index(folder, identity, rows)
    return Verdict(tuple(findings), *counted)
