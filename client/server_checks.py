"""The checks of a federation's server, as a client reaches it; they change nothing."""

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from http import HTTPStatus
from pathlib import Path

from cryptography import x509

from knnper.errors import CredentialError
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    authority_problem,
    expires_soon,
    expiry_problem,
    host_problem,
    hosts_of,
    parse_address,
    read_certificate,
)
from knnper.transport.diagnosis import (
    TIMEOUT_S,
    Check,
    Finding,
    HttpAnswer,
    NotHttpError,
    Verdict,
    connected,
    encrypted,
    fine,
    from_message,
    gateway_versions,
    get,
    own_versions,
    plain_answer,
    problem,
    skipped,
    speaks_tls,
    version_finding,
    warning,
)

GATEWAY = "the federation's gateway"  # what was expected where other software answers
_CONTROL = f"{flower.CONTROL}list-nodes"
_CORRECT_SERVER = "correct `server`: it is `listen` of the server's settings"
# A warning comes before Flower's own limits of clock differences are reached.
_NOTABLE_AHEAD_S = 2.0
_NOTABLE_BEHIND_S = 60.0
# OpenSSL's codes of problems of the certificate itself: not yet valid, expired, and
# mismatches of the host name, e-mail or address.
_NOT_OF_AUTHORITY = frozenset({9, 10, 62, 63, 64})


def server_checks(address: str, ca: Path | None) -> Iterator[Check]:
    """Yield the checks of a server as a client reaches it; without TLS if no ``ca``."""
    server = _ServerChecks(address, ca is not None)
    yield Check("server", server.check_connection)
    yield Check("tls", server.check_tls, ("server",))
    yield Check("gateway", server.check_gateway, ("tls",))
    yield Check("clock", server.check_clock, ("gateway",))
    yield Check("version", server.check_version, ("gateway",))
    if ca is not None:
        yield Check("certificate", lambda: server.check_certificate(ca), ("gateway",))


class _ServerChecks:
    def __init__(self, address: str, with_tls: bool) -> None:
        self.address = parse_address(address)
        self._with_tls = with_tls

    def check_connection(self) -> Finding:
        address = self.address
        try:
            with connected(address):
                return fine(f"{address} takes connections")
        except (socket.gaierror, UnicodeError) as error:
            return problem(
                f"the name {address.host} cannot be resolved ({error})",
                "correct `server`, fix this machine's DNS, or use /etc/hosts",
            )
        except ConnectionRefusedError:
            message = f"nothing listens at {address}"
            fix = "start the server there (knnper fed server)"
        except TimeoutError:
            message = f"{address} did not answer within {TIMEOUT_S:g} s"
            fix = f"let TCP port {address.port} through the firewalls on the way"
        except OSError as error:
            message = f"{address} cannot be reached ({error.strerror or error})"
            fix = "fix this machine's network or route"
        return problem(message, f"{fix}, or {_CORRECT_SERVER}")

    def check_tls(self) -> Finding:
        tls_error = ""
        if self._with_tls:
            try:
                with encrypted(self.address) as connection:
                    return fine(f"{self.address} speaks {connection.version()}")
            except OSError as error:
                tls_error = f" ({error})"
        speaks_http = plain_answer(self.address, flower.HEALTH) is not None
        if self._with_tls and speaks_http:
            return problem(
                f"{self.address} speaks HTTP without TLS",
                f"have the server started with `tls` in its settings, or "
                f"{_CORRECT_SERVER}; without TLS, the client needs `insecure: true` in "
                "place of `tls` and `key`",
                "TLS, since the client's settings have `tls`",
            )
        if speaks_http:
            return warning(
                "nothing is encrypted or authenticated: `insecure: true`",
                "give `tls` and `key`, which the operator makes with: knnper fed init",
            )
        if not self._with_tls and speaks_tls(self.address):
            return problem(
                f"{self.address} speaks TLS",
                "remove `insecure: true`, and give `tls` and `key`, which the operator "
                "makes with: knnper fed add-client",
                "no TLS, since the client's settings have `insecure: true`",
            )
        return self._other_software(f"neither HTTP nor TLS{tls_error}")

    def check_gateway(self) -> Finding:
        try:
            health = self.health
        except (NotHttpError, OSError) as error:
            return self._other_software(f"it does not answer in HTTP ({error})")
        is_gateway = bool(gateway_versions(health.headers))
        is_ok = health.status == HTTPStatus.OK
        if is_gateway and is_ok:
            return fine(f"{self.address} is a federation's gateway")
        if is_gateway:
            return problem(
                f"the gateway at {self.address} answers, and Flower behind it does not "
                f"(HTTP status {health.status})",
                "wait a minute; then the operator reads superlink.log in the server's "
                "state folder (knnper fed doctor FEDERATION)",
            )
        if self._get(_CONTROL).status == HTTPStatus.METHOD_NOT_ALLOWED:
            return problem(
                f"{self.address} is Flower's own port, through which anyone who "
                "reaches it can run code on every client",
                f"{_CORRECT_SERVER}, not of `control`; a SuperLink without `knnper "
                "fed server` needs a gateway in front of it",
                "the gateway's port",
            )
        if is_ok:
            return warning(
                f"{self.address} answers, and is no gateway of knnper's",
                f"if it is not your own proxy: {_CORRECT_SERVER}",
            )
        return self._other_software(
            f"{flower.HEALTH} gives HTTP status {health.status}"
        )

    def check_clock(self) -> Finding:
        ahead_s = self.health.seconds_ahead()
        if ahead_s is None:
            return skipped("the server does not send its time")
        if -_NOTABLE_BEHIND_S < ahead_s < _NOTABLE_AHEAD_S:
            return fine(f"within {max(abs(ahead_s), 0.5):.1f} s of the server's")
        most_behind_s = flower.AGO_S + flower.AHEAD_S
        is_accepted = -most_behind_s < ahead_s < flower.AHEAD_S
        direction = "ahead of" if ahead_s > 0 else "behind"
        return Finding(
            Verdict.WARNING if is_accepted else Verdict.PROBLEM,
            f"this machine's clock is {abs(ahead_s):.1f} s {direction} the server's",
            f"at most {flower.AHEAD_S} s ahead, and {most_behind_s} s behind: Flower "
            "rejects signatures of another time",
            "set the clocks of both machines by NTP (timedatectl set-ntp true)",
        )

    def check_version(self) -> Finding:
        return version_finding(own_versions(), gateway_versions(self.health.headers))

    def check_certificate(self, ca: Path) -> Finding:
        try:
            authority = read_certificate(ca)
        except CredentialError as error:
            return problem(
                str(error), "copy the federation's ca.crt there, or correct `tls.ca`"
            )
        if (expired := expiry_problem(authority, datetime.now(UTC))) is not None:
            return problem(
                f"of the authority, {expired.partition('; ')[0]}",
                "make a new federation folder, and copy its files to all machines",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca)
        try:
            with encrypted(self.address, context) as connection:
                certificate = _peer_certificate(connection)
        except ssl.SSLCertVerificationError as error:
            return self._explain_rejection(authority, error)
        soon = expires_soon(certificate, datetime.now(UTC))
        if soon is not None:
            return from_message(Verdict.WARNING, soon)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        return fine(f"for {', '.join(hosts_of(certificate))}, valid until {until}")

    @cached_property
    def health(self) -> HttpAnswer:
        """The answer to a health request; the server is not authenticated."""
        return self._get(flower.HEALTH)

    def _get(self, path: str) -> HttpAnswer:
        opened = encrypted if self._with_tls else connected
        with opened(self.address) as connection:
            return get(connection, self.address, path)

    def _other_software(self, symptom: str) -> Finding:
        host, port = self.address.host, self.address.port
        return problem(
            f"other software has the port {port} of {host}: {symptom}",
            _CORRECT_SERVER,
            GATEWAY,
        )

    def _explain_rejection(
        self, authority: x509.Certificate, error: ssl.SSLCertVerificationError
    ) -> Finding:
        """Name all problems of a certificate; TLS rejects it for the first one."""
        with encrypted(self.address) as connection:
            certificate = _peer_certificate(connection)
        messages = []
        now = datetime.now(UTC)
        server_now = now - timedelta(seconds=self.health.seconds_ahead() or 0.0)
        expired = expiry_problem(certificate, now)
        if expired is not None and expiry_problem(certificate, server_now) is None:
            messages.append(
                f"the certificate is not valid at {now:%Y-%m-%d %H:%M} UTC, which is "
                "this machine's time, and valid at the server's; set this machine's "
                "clock"
            )
        elif expired is not None:
            messages.append(expired)
        if wrong_host := host_problem(certificate, self.address.host):
            messages.append(wrong_host)
        other = authority_problem(certificate, authority)
        if other is not None and error.verify_code not in _NOT_OF_AUTHORITY:
            messages.append(other)
        parts = [message.partition("; ") for message in messages] or [
            (
                f"the certificate is not accepted ({error.verify_message})",
                "; ",
                "have the operator renew it: knnper fed renew",
            )
        ]
        return problem(
            "; ".join(message for message, _, _ in parts),
            "; ".join(fix for *_, fix in parts),
        )


def _peer_certificate(connection: ssl.SSLSocket) -> x509.Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise ssl.SSLError("the server shows no certificate")
    return x509.load_der_x509_certificate(der)
