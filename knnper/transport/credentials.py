"""Addresses, TLS certificates, and the keys of clients."""

import base64
import hashlib
import ipaddress
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from knnper.errors import CredentialError
from knnper.files import read_file, write_atomically

T = TypeVar("T")

# Permissions of files.
SECRET = 0o600
PUBLIC = 0o644

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the longest that common TLS clients accept
# Start of validity before now, since the clocks of machines differ a little.
_BACKDATED = timedelta(hours=1)
_EXPIRES_SOON = timedelta(days=30)
# Longest common name in X.520; alternative names hold the whole name of a host.
_LONGEST_NAME = 64

_LAST_PORT = 65535
_RENEW_HINT = "make a new one with: knnper fed renew FEDERATION"
_KEY_HINT = "made with: ssh-keygen -t ecdsa -b 384 -N '' -f NAME.key"


@dataclass(frozen=True)
class Address:
    """Host and port of a listening server."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def on_this_machine(self) -> "Address":
        """The address at which this machine reaches it, if it listens everywhere."""
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return Address(loopback, self.port)


def parse_address(text: str) -> Address:
    """Return ``HOST:PORT`` as an `Address`; IPv6 is written as in ``[::1]:8443``."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    is_host = bare and bracketed == (":" in bare) and not set("/@[] ") & set(bare)
    if not is_host or not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
        raise ValueError(
            f"found {text!r}, expected HOST:PORT with a port from 1 to {_LAST_PORT}, "
            "as in federation.example.org:8443 or [::1]:8443"
        )
    return Address(bare, int(port))


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write ``content`` to the new file ``path`` with the permissions ``mode``."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        advice = "credentials are never overwritten; move it away"
        raise CredentialError(f"{path} exists already: {advice}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read_as(path: Path, expected: str, parse: Callable[[bytes], T]) -> T:
    """Read and parse ``path``; raise `CredentialError` with ``expected`` on failure."""
    try:
        content = read_file(path)
    except FileNotFoundError as error:
        raise CredentialError(
            f"there is no file {path}; expected {expected}"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise CredentialError(f"{path} cannot be read: {reason}") from error
    try:
        return parse(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialError(f"{path} does not hold {expected} ({error})") from error


def permission_problem(path: Path) -> str | None:
    """Return the problem with the permissions of the secret ``path``, or None."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 == 0:
        return None
    return f"{path} is open to other users (mode {mode:04o}); run: chmod 600 {path}"


@dataclass(frozen=True)
class CertifiedKey:
    """A certificate together with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Write both as PEM; the key is readable by its owner only."""
        secret = self.key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        write_new(key, secret, SECRET)
        write_certificate(certificate, self.certificate)


def new_authority(name: str, days: int = AUTHORITY_DAYS) -> CertifiedKey:
    """Return a new authority (CA): a certificate that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate(name, days, key.public_key()).issuer_name(_named(name))
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return CertifiedKey(builder.sign(key, hashes.SHA256()), key)


def issue_server_certificate(
    authority: CertifiedKey, hosts: Sequence[str], days: int = SERVER_DAYS
) -> CertifiedKey:
    """Return a new certificate with a new key for the server that is at ``hosts``."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer, issuer_key = authority.certificate, authority.key.public_key()
    builder = _certificate(hosts[0], days, key.public_key(), issuer.not_valid_after_utc)
    builder = builder.issuer_name(issuer.subject)
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(False, None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), False),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return CertifiedKey(builder.sign(authority.key, hashes.SHA256()), key)


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write ``certificate`` as PEM to the new file ``path``."""
    write_new(path, certificate.public_bytes(Encoding.PEM), PUBLIC)


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate in the PEM file ``path``."""
    return read_as(path, "a certificate in PEM", x509.load_pem_x509_certificate)


def read_identity(certificate: Path, key: Path) -> CertifiedKey:
    """Read the certificate and private key of an authority or server from PEM files."""
    expected = "a private key in PEM without a passphrase"
    secret = read_as(key, expected, lambda content: load_pem_private_key(content, None))
    if not isinstance(secret, ec.EllipticCurvePrivateKey):
        type_name = type(secret).__name__
        raise CredentialError(
            f"{key} holds a {type_name}; expected an elliptic-curve key"
        )
    return CertifiedKey(read_certificate(certificate), secret)


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


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_LONGEST_NAME])])


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


def expiry_problem(certificate: x509.Certificate, now: datetime) -> str | None:
    """Describe why a certificate is not valid at ``now``, an aware time, or None."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        return (
            f"the certificate is valid from {start:%Y-%m-%d %H:%M} UTC on, and this "
            f"machine's clock shows {now:%Y-%m-%d %H:%M}; set the clock"
        )
    if now > end:
        return f"the certificate expired on {end:%Y-%m-%d %H:%M} UTC; {_RENEW_HINT}"
    return None


def expires_soon(certificate: x509.Certificate, now: datetime) -> str | None:
    """Describe when a certificate expires if that is within 30 days, or None."""
    end = certificate.not_valid_after_utc
    if now + _EXPIRES_SOON < end:
        return None
    return f"the certificate expires on {end:%Y-%m-%d %H:%M} UTC; {_RENEW_HINT}"


def host_problem(certificate: x509.Certificate, host: str) -> str | None:
    """Describe why a certificate is not for a DNS name or IP address, or None."""
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
    """Describe why ``authority`` did not sign a certificate, or None."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return (
            f"the certificate of {certificate.subject.rfc4514_string()} was not signed "
            f"by {authority.subject.rfc4514_string()}; copy the ca.crt of this "
            "federation to the clients"
        )
    return None


def _is_for(name: str, host: str) -> bool:
    """Whether the name in a certificate covers ``host``; ``*`` is one label."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        pass
    if name.startswith("*."):
        return host.lower().partition(".")[2] == name[2:].lower()
    return name.lower() == host.lower()


def new_node_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on the curve P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write ``key`` to ``path`` and its public half to ``path`` with ``.pub``."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_new(path, private, SECRET)
    write_public_key(path.with_name(f"{path.name}.pub"), key.public_key())


def write_public_key(path: Path, key: ec.EllipticCurvePublicKey) -> None:
    """Write ``key`` in OpenSSH's format to the new file ``path``."""
    write_new(path, _openssh(key) + b"\n", PUBLIC)


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in ``path``."""
    expected = (
        f"an OpenSSH private key on a NIST curve without a passphrase, {_KEY_HINT}"
    )
    return read_as(path, expected, _private)


def replace_node_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Replace the key at ``path``, and record the fingerprint of the old one beside it.

    The state of a client belongs to its key. By the recorded fingerprints
    (`replaced_keys`) the client finds its state under the new key.
    """
    old = fingerprint(read_node_key(path).public_key())
    replaced = sorted({*replaced_keys(path), old})
    write_atomically(
        _replaces_file(path), "".join(f"{key_sha256}\n" for key_sha256 in replaced)
    )
    draft = path.with_name(f".{path.name}.new")
    for file in (draft, _public_file(draft)):
        file.unlink(missing_ok=True)  # of a call that was cut short
    write_node_key(draft, key)
    _public_file(draft).replace(_public_file(path))
    draft.replace(path)


def replaced_keys(path: Path) -> frozenset[str]:
    """Return the fingerprints of keys that the one at ``path`` has replaced."""
    try:
        return frozenset(_replaces_file(path).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return frozenset()


def _replaces_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaces")


def _public_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in ``path``."""
    return read_as(path, f"an OpenSSH public key on a NIST curve, {_KEY_HINT}", _public)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the key's SHA-256 as ``ssh-keygen -l`` prints it: ``SHA256:...``."""
    blob = base64.b64decode(_openssh(key).split()[1])
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


def _openssh(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def _private(content: bytes) -> ec.EllipticCurvePrivateKey:
    if b"PRIVATE KEY" not in content:
        raise ValueError("this is no private key")
    key = load_ssh_private_key(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"found a {type(key).__name__}")
    return key


def _public(content: bytes) -> ec.EllipticCurvePublicKey:
    if b"PRIVATE KEY" in content:
        raise ValueError("this is a private key; give the file that ends in .pub")
    key = load_ssh_public_key(content)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"found a {type(key).__name__}")
    return key
