"""``knnper fed audit`` and ``knnper site audit``: verify and show audit logs."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.fed_clients import FederationPath, server_settings
from knnper.cli.options import AsJson, ClientFile
from knnper.cli.terminal import print_json, print_table, say, tell

if TYPE_CHECKING:
    from knnper.audit_log import AuditLog

ExpectHead = Annotated[
    str,
    typer.Option(
        metavar="HASH",
        help="A head that was printed earlier. The log must contain it, which finds a "
        "log that was shortened or rewritten since then.",
        show_default=False,
    ),
]
Last = Annotated[
    int, typer.Option(min=0, metavar="N", help="How many of the last entries to show.")
]
_HEAD = re.compile("[0-9a-f]{64}")
_CHAINED = ("number", "time", "event", "previous", "hash")


def audit_site(
    config: ClientFile,
    expect_head: ExpectHead = "",
    last: Last = 10,
    as_json: AsJson = False,
) -> None:
    """Verify the audit log of a client and its service, and show its last entries.

    The exit code is 1 if the log was altered. Note the head elsewhere.
    """
    from knnper.audit_log import AuditLog
    from knnper.client.settings import read_client

    _show(AuditLog.of(read_client(config).state), expect_head, last, as_json=as_json)


def audit_server(
    federation: FederationPath,
    expect_head: ExpectHead = "",
    last: Last = 10,
    as_json: AsJson = False,
) -> None:
    """Verify the audit log of a federation's server, and show its last entries.

    The exit code is 1 if the log was altered. Note the head elsewhere.
    """
    from knnper.audit_log import AuditLog

    log = AuditLog.of(server_settings(federation).state)
    _show(log, expect_head, last, as_json=as_json)


def _show(log: "AuditLog", expect_head: str, last: int, *, as_json: bool) -> None:
    head = expect_head.strip().lower()
    if head and not _HEAD.fullmatch(head):
        raise typer.BadParameter(
            f"--expect-head: found {head!r}, expected the 64 hexadecimal digits of a "
            "head, as this command prints it"
        )
    verified = log.verify(head, last)
    if as_json:
        print_json(
            {
                "entries": verified.num_entries,
                "head": verified.head,
                "cut_off": verified.is_cut_off,
                "last": list(verified.last),
            }
        )
    else:
        if verified.last:
            print_table(("entry", "time", "event", "details"), _rows(verified.last))
        tell(f"entries: {verified.num_entries} in {log.path}, none altered")
        tell(f"head: {verified.head}")
    if verified.is_cut_off:
        say(
            "An incomplete line follows the last entry: a process writes it now, or "
            "was killed while it wrote. The next entry replaces an incomplete line."
        )


def _rows(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for entry in entries:
        details = {key: value for key, value in entry.items() if key not in _CHAINED}
        names = (str(entry.get(name, "")) for name in ("number", "time", "event"))
        rows.append([*names, json.dumps(details)])
    return rows
