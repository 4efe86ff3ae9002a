"""All that is looked at of one server."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509

from knnper.errors import CredentialError, RunError
from knnper.files import lock_holder
from knnper.server.link.authorized import AuthorizedFolder, read_roster
from knnper.server.link.registration import AUTHORIZED, census
from knnper.server.link.setup import LOCK
from knnper.server.link.superlink import Note
from knnper.server.settings import ServerSettings, TlsFiles
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
    connected,
    encrypted,
    fine,
    folder_finding,
    get,
    own_versions,
    problem,
    problem_told,
    told_versions,
    warning,
)
from knnper.transport.sockets import listen

_LOG = "the server's log says why; a key that was removed cannot come back"


@dataclass(frozen=True)
class Clients:
    """The clients of a server."""

    settings: ServerSettings

    def authorized(self) -> Finding:
        """Look at the folder of public keys."""
        folder = self.settings.authorized
        keys, problems = AuthorizedFolder(folder).keys()
        if problems:
            return problem(
                "; ".join(problems),
                f"remove or replace these files in {folder}",
                "one public key a file, each in one file only",
            )
        if not keys:
            return warning(
                f"no client may connect: {folder} holds no key",
                "knnper fed add-client, or register",
            )
        return fine(f"{len(keys)} in {folder}: {', '.join(keys)}")

    def registered(self) -> Finding:
        """Look whether Flower knows those who may connect, and who is online."""
        found = census(self.settings)
        if found.problems:
            return problem("; ".join(found.problems), "look into the server's log")
        left_out = [one.name for one in found.clients if one.status == AUTHORIZED]
        if left_out:
            return problem(f"not registered: {', '.join(left_out)}", _LOG)
        online = [one.name for one in found.clients if one.status == "online"]
        return fine(
            f"{len(found.clients)} registered, online: {', '.join(online) or 'none'}"
        )

    def roster(self) -> Finding:
        """Look at the file by which runs know who is behind which node."""
        try:
            roster = read_roster(self.settings.roster_file)
        except RunError as error:
            return problem(
                str(error),
                f"remove {self.settings.roster_file}; the server writes it anew",
            )
        return fine(f"{len(roster)} clients in {self.settings.roster_file}")


_CORRECT = "correct `tls`, or make the files with: knnper fed init, or renew"


@dataclass(frozen=True)
class Credentials:
    """What the server shows to clients."""

    files: TlsFiles

    def certificate(self) -> Finding:
        """Look whether clients accept the certificate."""
        try:
            chain = read_as(
                self.files.certificate,
                "certificates in PEM",
                x509.load_pem_x509_certificates,
            )
            authority = read_certificate(self.files.ca)
        except CredentialError as error:
            return problem(str(error), _CORRECT)
        told = expiry_problem(chain[0], datetime.now(UTC))
        for signed, signer in pairwise([*chain, authority]):
            told = told or authority_problem(signed, signer)
        if told is not None:
            return problem_told(told)
        return _accepted(chain[0])

    def key(self) -> Finding:
        """Look whether the key is readable, secret, and that of the certificate."""
        files = self.files
        try:
            exposed = permission_problem(files.key)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key, _no_passphrase)
        except ssl.SSLError as error:
            return problem(
                f"{files.key} cannot be used with {files.certificate} ({error.reason})",
                f"they come as a pair, without a passphrase; {_CORRECT}",
            )
        except OSError as error:
            return problem(f"{files.key} cannot be read ({error.strerror})", _CORRECT)
        if exposed is not None:
            found, _, advice = exposed.partition("; ")
            return warning(found, advice, "mode 0600")
        return fine(f"{files.key} belongs to the certificate")


def _accepted(certificate: x509.Certificate) -> Finding:
    names = ", ".join(hosts_of(certificate))
    soon = expires_soon(certificate, datetime.now(UTC))
    if soon is not None:
        found, _, advice = soon.partition("; ")
        return warning(found, advice)
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    return fine(f"for {names}, valid until {until}; clients use one of these names")


def _no_passphrase() -> str:
    """Answer for whoever would ask on the terminal."""
    return ""


_HEALTH = "/health"
_OK = 200
_SILENT_S = 30.0
_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """Where a server listens."""

    settings: ServerSettings

    def server(self) -> Finding:
        """Look whether the server runs."""
        if not is_running(self.settings.state):
            return warning("does not run", "start it: knnper fed server SERVER.yaml")
        return fine(f"runs, in {self.settings.state}")

    def gateway(self) -> Finding:
        """Look who has the port that clients reach."""
        return self._port(self.settings.listen_address, "listen", is_gateway=True)

    def control(self) -> Finding:
        """Look who has the port that is for the operator."""
        return self._port(self.settings.control_address, "control", is_gateway=False)

    def processes(self) -> Finding:
        """Look whether all that a running server needs is there."""
        state = self.settings.state
        found = Note.read(state)
        if found is None:
            return problem(
                f"the server runs, and {state} says nothing of its processes",
                "start it again: it may be of an earlier version",
            )
        (note, age_s), log = found, state / "superlink.log"
        if not note.lives():
            return problem(
                f"Flower's SuperLink, process {note.superlink}, is gone",
                f"the server starts it again within seconds; {log} says why it ended",
            )
        if age_s > _SILENT_S:
            return problem(
                f"no run that is submitted begins: Flower's SuperLink, process "
                f"{note.superlink}, did not answer the server for {age_s:.0f} s",
                f"look into {log}; end that process, and the server starts it again",
            )
        if note.starts > 1:
            return warning(
                f"Flower's SuperLink was started {note.starts} times",
                f"{log} and the server's log say why it ended; runs that were under "
                "way have failed: submit them again with --resume",
            )
        return fine(f"Flower's SuperLink is process {note.superlink}, and starts runs")

    def _port(self, address: Address, setting: str, *, is_gateway: bool) -> Finding:
        if not is_running(self.settings.state):
            return _free(address, setting)
        where = Address(_UNSPECIFIED.get(address.host, address.host), address.port)
        opened = connected if self.settings.insecure else encrypted
        try:
            with opened(where) as connection:
                answer = get(connection, where, _HEALTH)
        except (NotHttpError, OSError) as error:
            return problem(
                f"the server runs, and {where} does not answer ({error})",
                f"start it again if `{setting}` was changed since; else look into its "
                f"log and {self.settings.state / 'superlink.log'}",
            )
        if bool(told_versions(answer.headers)) != is_gateway:
            return _taken(address, setting)
        if answer.status != _OK:
            return problem(
                f"Flower's SuperLink does not answer (HTTP status {answer.status})",
                f"look into {self.settings.state / 'superlink.log'}",
            )
        return fine(f"the server answers at {where}")


def is_running(state: Path) -> bool:
    """Return whether a server holds the folder ``state``; it notices nothing."""
    return lock_holder(state / LOCK) is not None


def _free(address: Address, setting: str) -> Finding:
    try:
        listen(address.host, address.port).close()
    except RunError:
        return _taken(address, setting)
    return fine(f"{address} is free")


def _taken(address: Address, setting: str) -> Finding:
    return problem(
        f"other software has {address}, or it is no address of this machine",
        f"end that program (ss -ltnp shows it), or set `{setting}` to another address",
        "this server's own port",
    )


def server_checks(settings: ServerSettings) -> list[Check]:
    """Return the checks of a server, in the order in which they make sense."""
    return list(_checks(settings))


def _checks(settings: ServerSettings) -> Iterator[Check]:
    runs = settings.runs_folder
    yield Check("folder", lambda: folder_finding(settings.state, "state"))
    yield Check("runs", lambda: folder_finding(runs, "runs"))
    yield Check("version", _versions)
    if settings.tls is None:
        yield Check("tls", _insecure)
    else:
        credentials = Credentials(settings.tls)
        yield Check("certificate", credentials.certificate)
        yield Check("key", credentials.key)
    ports, clients = Ports(settings), Clients(settings)
    yield Check("server", ports.server)
    yield Check("gateway port", ports.gateway)
    yield Check("control port", ports.control)
    if is_running(settings.state):
        yield Check("processes", ports.processes)
    if settings.tls is not None:
        yield Check("authorized", clients.authorized)
        yield Check("roster", clients.roster)
        if is_running(settings.state):
            yield Check("registered", clients.registered, ("control port",))


def _versions() -> Finding:
    shown = (f"{package} {version}" for package, version in own_versions().items())
    return fine(f"{', '.join(shown)}; the clients need the same")


def _insecure() -> Finding:
    return warning(
        "nothing is encrypted, and whoever reaches the gateway is a client: `insecure: "
        "true`",
        "make certificates and keys: knnper fed init",
    )
