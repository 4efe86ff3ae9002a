"""Whether the server is who it says, to this client."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from client.doctor.connection import Connection
from knnper.config.errors import CredentialError
from knnper.transport.credentials.certificates import hosts_of, read_certificate
from knnper.transport.credentials.checks import (
    authority_problem,
    expires_soon,
    expiry_problem,
    host_problem,
)
from knnper.transport.diagnosis.finding import (
    Finding,
    fine,
    problem,
    problem_told,
    warning,
)
from knnper.transport.diagnosis.network import encrypted

_COPY = "copy the federation's ca.crt there, or correct `tls.ca`"
# OpenSSL's numbers of what is wrong with the certificate itself.
_NOT_OF_AUTHORITY = frozenset({9, 10, 62, 63, 64})


@dataclass(frozen=True)
class Trust:
    """The server's certificate and the authority that the client trusts.

    Attributes
    ----------
    connection
        To the server.
    ca
        The authority's certificate.
    """

    connection: Connection
    ca: Path

    def authority_is_readable(self) -> Finding:
        """Look at the authority's certificate, which is a file."""
        try:
            authority = read_certificate(self.ca)
        except CredentialError as error:
            return problem(str(error), _COPY)
        told = expiry_problem(authority, datetime.now(UTC))
        if told is not None:
            found = told.partition("; ")[0]
            advice = "make a new federation folder, and copy its files to all machines"
            return problem(f"of the authority, {found}", advice)
        return fine(f"{authority.subject.rfc4514_string()} ({self.ca})")

    def certificate_is_accepted(self) -> Finding:
        """Look at the server's certificate, as Flower's node does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        try:
            with encrypted(self.connection.address, context) as connection:
                certificate = _shown(connection)
        except ssl.SSLCertVerificationError as error:
            return self._why_not(error)
        soon = expires_soon(certificate, datetime.now(UTC))
        if soon is not None:
            found, _, advice = soon.partition("; ")
            return warning(found, advice)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        return fine(f"for {', '.join(hosts_of(certificate))}, valid until {until}")

    def _why_not(self, error: ssl.SSLCertVerificationError) -> Finding:
        with encrypted(self.connection.address) as connection:
            certificate = _shown(connection)
        told = list(self._complaints(certificate, error.verify_code))
        if not told:
            return problem_told(
                f"the certificate is not accepted ({error.verify_message}); have the "
                "operator renew it: knnper federation renew"
            )
        parts = [sentence.partition("; ") for sentence in told]
        return problem(
            "; ".join(found for found, _, _ in parts),
            "; ".join(advice for _, _, advice in parts),
        )

    def _complaints(self, certificate: x509.Certificate, code: int) -> Iterator[str]:
        now = datetime.now(UTC)
        expired = expiry_problem(certificate, now)
        if expired is not None:
            yield self._by_whose_clock(certificate, now) or expired
        wrong_host = host_problem(certificate, self.connection.address.host)
        if wrong_host is not None:
            yield wrong_host
        wrong_authority = authority_problem(certificate, read_certificate(self.ca))
        if wrong_authority is not None and code not in _NOT_OF_AUTHORITY:
            yield wrong_authority

    def _by_whose_clock(
        self, certificate: x509.Certificate, now: datetime
    ) -> str | None:
        """Say so if only this machine's clock has the certificate not valid."""
        ahead_s = self.connection.health.seconds_ahead() or 0.0
        if expiry_problem(certificate, now - timedelta(seconds=ahead_s)) is not None:
            return None
        return (
            f"the certificate is not valid at {now:%Y-%m-%d %H:%M} UTC, which is this "
            "machine's time, and valid at the server's; set this machine's clock"
        )


def _shown(connection: ssl.SSLSocket) -> x509.Certificate:
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise ssl.SSLError("the server shows no certificate")
    return x509.load_der_x509_certificate(der)
