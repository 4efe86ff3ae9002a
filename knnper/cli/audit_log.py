"""``knnper fed audit`` and ``knnper site audit``: verify and show audit logs."""

import json
import re
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.fed_clients import FederationPath, server_settings
from knnper.cli.options import ClientFile
from knnper.cli.terminal import print_table, tell

ExpectHead = Annotated[
    str,
    typer.Option(
        metavar="HASH",
        help="A head that was printed earlier. The log must contain it, which finds a "
        "log that was shortened or rewritten since then.",
        show_default=False,
    ),
]
_HEAD = re.compile("[0-9a-f]{64}")
_CHAINED = ("number", "time", "event", "previous", "hash")
_NUM_SHOWN = 10


def audit_site(config: ClientFile, expect_head: ExpectHead = "") -> None:
    """Verify the audit log of a client and its service, and show its last entries.

    The exit code is 1 if the log was altered. Note the head elsewhere.
    """
    from knnper.client.settings import read_client

    _show(read_client(config).state, expect_head)


def audit_server(federation: FederationPath, expect_head: ExpectHead = "") -> None:
    """Verify the audit log of a federation's server, and show its last entries.

    The exit code is 1 if the log was altered. Note the head elsewhere.
    """
    _show(server_settings(federation).state, expect_head)


def _show(state: Path, expect_head: str) -> None:
    """Verify and show the log of a state folder."""
    from knnper.audit_log import NO_HASH, AuditLog

    expected = expect_head.strip().lower() or NO_HASH
    if not _HEAD.fullmatch(expected):
        raise typer.BadParameter(
            f"--expect-head: found {expected!r}, expected the 64 hexadecimal digits of "
            "a head, as this command prints it"
        )
    log = AuditLog.of(state)
    number, head = 0, NO_HASH
    rows: deque[list[str]] = deque(maxlen=_NUM_SHOWN)
    for entry in log.entries(expected):
        number, head = entry["number"], entry["hash"]
        details = {key: value for key, value in entry.items() if key not in _CHAINED}
        names = (str(entry.get(name, "")) for name in ("number", "time", "event"))
        rows.append([*names, json.dumps(details)])
    if rows:
        print_table(("entry", "time", "event", "details"), list(rows))
    tell(f"entries: {number} in {log.path}, none altered")
    tell(f"head: {head}")
