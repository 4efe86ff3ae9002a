"""Certificates and keys as an operator makes them, short-lived."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
HOUR = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Authority:
    """A CA and where its files go."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def file(self) -> Path:
        return self.folder / "ca.crt"

    def server(
        self, host: str = "127.0.0.1", ends: datetime.datetime = NOW + HOUR
    ) -> tuple[Path, Path]:
        """Return certificate and key of a server, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        made = _certificate("server", key, self.certificate.subject, ends)
        made = made.add_extension(x509.SubjectAlternativeName([name]), critical=False)
        made = made.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
            critical=False,
        )
        signed = made.sign(self.key, hashes.SHA256())
        certificate, secret = self.folder / "server.crt", self.folder / "server.key"
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(_pem(key, serialization.PrivateFormat.PKCS8))
        return certificate, secret


def new_authority(folder: Path) -> Authority:
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a CA")])
    made = _certificate("a CA", key, subject, NOW + HOUR)
    for extension, critical in (
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ):
        made = made.add_extension(extension, critical=critical)
    certificate = made.sign(key, hashes.SHA256())
    authority = Authority(folder, key, certificate)
    authority.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return authority


def new_key(path: Path) -> Path:
    """Write a client's key pair to ``path`` and ``path.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public)
    return path


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    secret = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 2 * HOUR)
        .not_valid_after(ends)
    )
