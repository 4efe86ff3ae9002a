"""Whether certificates fit their time, host, key and authority.

Each check returns None, or a sentence that says what is wrong and how to mend it.
"""

import ipaddress
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from knnper.transport.credentials.certificates import hosts_of

_RENEW = "make a new one with: knnper federation renew FOLDER"
_SOON = timedelta(days=30)


def expiry_problem(certificate: x509.Certificate, now: datetime) -> str | None:
    """Say whether ``certificate`` is not valid at ``now`` (which has a time zone)."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        return (
            f"the certificate is valid from {start:%Y-%m-%d %H:%M} UTC on, and this "
            f"machine's clock says {now:%Y-%m-%d %H:%M}; set the clock"
        )
    if now > end:
        return f"the certificate expired on {end:%Y-%m-%d %H:%M} UTC; {_RENEW}"
    return None


def expires_soon(certificate: x509.Certificate, now: datetime) -> str | None:
    """Say whether ``certificate``, valid at ``now``, is not so in 30 days."""
    end = certificate.not_valid_after_utc
    if now + _SOON < end:
        return None
    return f"the certificate expires on {end:%Y-%m-%d %H:%M} UTC; {_RENEW}"


def host_problem(certificate: x509.Certificate, host: str) -> str | None:
    """Say whether ``certificate`` is not for ``host``, a DNS name or IP address."""
    known = hosts_of(certificate)
    if any(_is_for(name, host) for name in known):
        return None
    return (
        f"the certificate is for {', '.join(known) or 'no host at all'}, not for "
        f"{host}; use one of these as the server's address, or renew it with "
        f"--host {host}"
    )


def authority_problem(
    certificate: x509.Certificate, authority: x509.Certificate
) -> str | None:
    """Say whether ``authority`` did not sign ``certificate``."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return (
            f"the certificate of {certificate.subject.rfc4514_string()} was not signed "
            f"by {authority.subject.rfc4514_string()}; copy the ca.crt of this "
            "federation to the clients"
        )
    return None


def key_problem(
    certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> str | None:
    """Say whether ``key`` is not the one that ``certificate`` is for."""
    der = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*der) == key.public_key().public_bytes(
        *der
    ):
        return None
    return "the private key does not belong to the certificate; they come as a pair"


def _is_for(name: str, host: str) -> bool:
    """Whether the name in a certificate covers ``host``; ``*`` is one label."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        pass
    if name.startswith("*."):
        return host.lower().partition(".")[2] == name[2:].lower()
    return name.lower() == host.lower()
