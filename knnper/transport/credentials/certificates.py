"""An authority of one's own, and the certificates that it gives to servers.

What these functions make can be made with ``openssl`` as well; the federation cares for
the files only.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from knnper.config.errors import CredentialError
from knnper.transport.credentials.files import PUBLIC, SECRET, read_as, write_new

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the longest that common TLS clients accept
# Of a common name, by X.520; a host's whole name is among the alternative names.
_LONGEST_NAME = 64
# Clocks of the machines differ a little.
_BACKDATED = timedelta(hours=1)


@dataclass(frozen=True)
class Identity:
    """A certificate together with its private key.

    Attributes
    ----------
    certificate
        What is shown to others.
    key
        P-256; never leaves the machine.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Write both as PEM; the key is readable by its owner only.

        Raises
        ------
        CredentialError
            If one of the files exists.
        """
        secret = self.key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        write_new(key, secret, SECRET)
        write_certificate(certificate, self.certificate)


def new_authority(name: str, days: int = AUTHORITY_DAYS) -> Identity:
    """Return a new authority (CA): a certificate that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate(name, days, key.public_key()).issuer_name(_named(name))
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Identity(builder.sign(key, hashes.SHA256()), key)


def issue_server_certificate(
    authority: Identity, hosts: Sequence[str], days: int = SERVER_DAYS
) -> Identity:
    """Return a new certificate with a new key for the server that is at ``hosts``.

    Parameters
    ----------
    authority
        Signs it.
    hosts
        DNS names and IP addresses under which clients reach the server; at least one.
    days
        How long it is valid, at most as long as the authority's own.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    builder = _certificate(hosts[0], days, key.public_key(), issuer.not_valid_after_utc)
    builder = builder.issuer_name(issuer.subject)
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(False, None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(_general_names(hosts)), False),
        (_issuer_key(authority.key), False),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return Identity(builder.sign(authority.key, hashes.SHA256()), key)


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write ``certificate`` as PEM to the new file ``path``."""
    write_new(path, certificate.public_bytes(Encoding.PEM), PUBLIC)


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate in the PEM file ``path``.

    Raises
    ------
    CredentialError
        If there is none.
    """
    return read_as(path, "a certificate in PEM", x509.load_pem_x509_certificate)


def read_identity(certificate: Path, key: Path) -> Identity:
    """Return the authority or server whose PEM files are given.

    Raises
    ------
    CredentialError
        If a file cannot be read, or the key is no elliptic-curve key.
    """
    what = "a private key in PEM without a passphrase"
    secret = read_as(key, what, lambda content: load_pem_private_key(content, None))
    if not isinstance(secret, ec.EllipticCurvePrivateKey):
        found = type(secret).__name__
        raise CredentialError(f"{key} holds a {found}; expected an elliptic-curve key")
    return Identity(read_certificate(certificate), secret)


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names and IP addresses that ``certificate`` is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return ()
    names = extension.value
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))


def main_host_of(certificate: x509.Certificate) -> str:
    """Return the host that the certificate was issued to in the first place."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    common = str(names[0].value) if names else ""
    hosts = hosts_of(certificate)
    return next((host for host in hosts if host[:_LONGEST_NAME] == common), hosts[0])


def _certificate(
    name: str,
    days: int,
    public_key: ec.EllipticCurvePublicKey,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _BACKDATED)
        .not_valid_after(min(end, latest or end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
    )


def _issuer_key(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_LONGEST_NAME])])


def _general_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    return [_general_name(host) for host in dict.fromkeys(hosts)]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
