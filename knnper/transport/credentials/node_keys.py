"""A client's key pair: OpenSSH files, as ``ssh-keygen -t ecdsa -b 384`` makes them."""

import base64
import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from knnper.transport.credentials.files import PUBLIC, SECRET, read_as, write_new

_MAKE = "made with: ssh-keygen -t ecdsa -b 384 -N '' -f NAME.key"


def new_node_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on the curve P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write ``key`` to ``path`` and its public half to ``path`` with ``.pub``.

    Raises
    ------
    CredentialError
        If one of the files exists.
    """
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_new(path, private, SECRET)
    write_public_key(path.with_name(f"{path.name}.pub"), key.public_key())


def write_public_key(path: Path, key: ec.EllipticCurvePublicKey) -> None:
    """Write ``key`` in OpenSSH's format to the new file ``path``."""
    write_new(path, _openssh(key) + b"\n", PUBLIC)


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in ``path``.

    Raises
    ------
    CredentialError
        If it is no OpenSSH private key on a NIST curve, or has a passphrase.
    """
    what = f"an OpenSSH private key on a NIST curve without a passphrase, {_MAKE}"
    return read_as(path, what, _private)


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in ``path``.

    Raises
    ------
    CredentialError
        If it is no OpenSSH public key on a NIST curve.
    """
    return read_as(path, f"an OpenSSH public key on a NIST curve, {_MAKE}", _public)


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
