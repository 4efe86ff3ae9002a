"""The files of the server's certificate."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from cryptography import x509

from knnper.config.errors import CredentialError
from knnper.transport.credentials.certificates import hosts_of, read_certificate
from knnper.transport.credentials.checks import (
    authority_problem,
    expires_soon,
    expiry_problem,
)
from knnper.transport.credentials.files import permission_problem, read_as
from knnper.transport.diagnosis.finding import (
    Finding,
    fine,
    problem,
    problem_told,
    warning,
)
from server.settings import TlsFiles

_CORRECT = "correct `tls`, or make the files with: knnper federation init, or renew"


@dataclass(frozen=True)
class Credentials:
    """What the server shows to clients.

    Attributes
    ----------
    files
        Where it is.
    """

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
