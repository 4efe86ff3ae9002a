"""The checks of ``knnper fed doctor``."""

import ssl
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

from cryptography import x509

from knnper.errors import CredentialError, RunError
from knnper.files import lock_holder
from knnper.server.link.authorized import AuthorizedFolder, read_roster
from knnper.server.link.registration import AUTHORIZED, list_clients
from knnper.server.link.setup import LOCK
from knnper.server.settings import ServerSettings, TlsFiles
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    Address,
    authority_problem,
    expires_soon,
    expiry_problem,
    hosts_of,
    permission_problem,
    read_as,
    read_certificate,
)
from knnper.transport.diagnosis import (
    Check,
    Finding,
    NotHttpError,
    Verdict,
    connected,
    encrypted,
    fine,
    folder_finding,
    from_message,
    gateway_versions,
    get,
    problem,
    warning,
)
from knnper.transport.sockets import listen

_LOG = "the server's log has the reason; a removed key cannot be registered again"
_CORRECT = "correct `tls`, or make the files with: knnper fed init, or renew"


def _clients(settings: ServerSettings) -> Finding:
    folder = settings.authorized
    keys, problems = AuthorizedFolder(folder).keys()
    if problems:
        return problem(
            "; ".join(problems),
            f"remove or replace these files in {folder}",
            "one key per file, each key once",
        )
    if not keys:
        finding = f"no client may connect: {folder} holds no key"
        return warning(finding, "knnper fed add-client, or register")
    try:
        read_roster(settings.roster_file)
    except RunError as error:
        return problem(
            str(error), f"remove {settings.roster_file}; the server writes a new one"
        )
    return fine(f"{len(keys)} in {folder}: {', '.join(keys)}")


def _registered(settings: ServerSettings) -> Finding:
    clients, problems = list_clients(settings)
    if problems:
        return problem("; ".join(problems), "look into the server's log")
    left_out = [client.name for client in clients if client.status == AUTHORIZED]
    if left_out:
        return problem(f"not registered: {', '.join(left_out)}", _LOG)
    online = [client.name for client in clients if client.status == "online"]
    return fine(f"{len(clients)} registered, online: {', '.join(online) or 'none'}")


def _certificate(files: TlsFiles) -> Finding:
    try:
        chain = read_as(
            files.certificate, "certificates in PEM", x509.load_pem_x509_certificates
        )
        authority = read_certificate(files.ca)
    except CredentialError as error:
        return problem(str(error), _CORRECT)
    wrong = expiry_problem(chain[0], datetime.now(UTC))
    for signed, signer in pairwise([*chain, authority]):
        wrong = wrong or authority_problem(signed, signer)
    if wrong is not None:
        return from_message(Verdict.PROBLEM, wrong)
    soon = expires_soon(chain[0], datetime.now(UTC))
    if soon is not None:
        return from_message(Verdict.WARNING, soon)
    names, until = ", ".join(hosts_of(chain[0])), chain[0].not_valid_after_utc
    return fine(f"for {names}, valid until {until:%Y-%m-%d}; clients use one of these")


def _key(files: TlsFiles) -> Finding:
    try:
        exposed = permission_problem(files.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The function prevents a prompt for a passphrase on the terminal.
        context.load_cert_chain(files.certificate, files.key, lambda: "")
    except ssl.SSLError as error:
        finding = (
            f"{files.key} cannot be used with {files.certificate} ({error.reason})"
        )
        return problem(finding, f"they come as a pair, no passphrase; {_CORRECT}")
    except OSError as error:
        return problem(f"{files.key} cannot be read ({error.strerror})", _CORRECT)
    if exposed is not None:
        return from_message(Verdict.WARNING, exposed, "mode 0600")
    return fine(f"{files.key} belongs to the certificate")


def _server(settings: ServerSettings) -> Finding:
    if not is_running(settings.state):
        return problem("does not run", "start it: knnper fed server FEDERATION")
    return fine(f"runs, in {settings.state}")


def _port(settings: ServerSettings, address: Address, setting: str) -> Finding:
    if not is_running(settings.state):
        try:
            listen(address.host, address.port).close()
        except RunError:
            return _taken(address, setting)
        return fine(f"{address} is free")
    where = address.on_this_machine
    opened = connected if settings.insecure else encrypted
    try:
        with opened(where) as connection:
            answer = get(connection, where, flower.HEALTH)
    except (NotHttpError, OSError) as error:
        return problem(
            f"the server runs, and {where} does not answer ({error})",
            f"start it again if `{setting}` was changed since; else look into its "
            f"log and {settings.state / 'superlink.log'}",
        )
    if bool(gateway_versions(answer.headers)) != (setting == "listen"):
        return _taken(address, setting)
    if answer.status != HTTPStatus.OK:
        finding = f"Flower's SuperLink does not answer (HTTP status {answer.status})"
        return problem(finding, f"look into {settings.state / 'superlink.log'}")
    return fine(f"the server answers at {where}")


def is_running(state: Path) -> bool:
    """Return whether a server uses the folder ``state``, without disturbing it."""
    return lock_holder(state / LOCK) is not None


def _taken(address: Address, setting: str) -> Finding:
    return problem(
        f"other software has {address}, or it is no address of this machine",
        f"end that program (ss -ltnp shows it), or set `{setting}` to another address",
        "this server's own port",
    )


def server_checks(settings: ServerSettings) -> list[Check]:
    """Return the checks of a server; each presupposes the previous checks."""
    listen, control = settings.listen_address, settings.control_address
    tls, runs = settings.tls, is_running(settings.state)
    checks = [
        Check("folder", lambda: folder_finding(settings.state, "state")),
        Check("runs", lambda: folder_finding(settings.runs_folder, "runs")),
    ]
    if tls is None:
        finding = "`insecure: true`: nothing is encrypted, and clients need no key"
        open_to_all = warning(finding, "make certificates and keys: knnper fed init")
        checks.append(Check("tls", lambda: open_to_all))
    else:
        checks.append(Check("certificate", lambda: _certificate(tls)))
        checks.append(Check("key", lambda: _key(tls)))
    checks += [
        Check("server", lambda: _server(settings)),
        Check("gateway port", lambda: _port(settings, listen, "listen")),
        Check("control port", lambda: _port(settings, control, "control")),
    ]
    if tls is not None:
        checks.append(Check("clients", lambda: _clients(settings)))
        if runs:
            needs = ("control port",)
            checks.append(Check("registered", lambda: _registered(settings), needs))
    return checks
