"""The cryptographic operations of the protocols, each a call of a library.

Secrets are 16 random bytes from the operating system, as long as the security of X25519
and as a block of Shamir's secret sharing in ``pycryptodome``. Keys are derived from
them with HKDF, each with a text that names its purpose.
"""

import secrets
from collections.abc import Iterable, Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from knnper.secure.messages import SecureAggregationError
from knnper.secure.quantization import Words

SECRET_BYTES = 16

_KEY_BYTES = 32
_NONCE_BYTES = 12
_COUNTER_START = bytes(16)


def new_secret() -> bytes:
    """Return a secret from the operating system's generator, `SECRET_BYTES` long."""
    return secrets.token_bytes(SECRET_BYTES)


def from_hex(text: str) -> bytes:
    """Return the bytes that a peer wrote in hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise SecureAggregationError(
            "found a key or a share that is not hexadecimal"
        ) from error


def public_key(secret: bytes) -> bytes:
    """Return the X25519 public key of a secret, 32 bytes."""
    return _private_key(secret).public_key().public_bytes_raw()


def pair_key(secret: bytes, others_public_key: bytes, purpose: bytes) -> bytes:
    """Return the key of this client and another client, 32 bytes.

    It is the same for both only if they agree on ``purpose``.
    """
    try:
        other = X25519PublicKey.from_public_bytes(others_public_key)
        return _derived(_private_key(secret).exchange(other), purpose)
    except ValueError as error:
        raise SecureAggregationError(f"found an invalid public key: {error}") from error


def expanded_mask(key: bytes, size: int) -> Words:
    """Expand a key, used once, to a mask of shape (size,): the stream of AES-CTR."""
    stream = Cipher(algorithms.AES(key), modes.CTR(_COUNTER_START)).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), np.dtype("<u4"))


def self_mask(secret: bytes, size: int) -> Words:
    """Expand a client's self-mask secret to a mask of shape (size,)."""
    return expanded_mask(_derived(secret, b"self mask"), size)


def seal(key: bytes, plaintext: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate ``plaintext``, and authenticate ``context``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plaintext, context)


def open_sealed(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Decrypt the result of `seal`."""
    nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, ciphertext, context)
    except (InvalidTag, ValueError) as error:
        raise SecureAggregationError(
            "found a share that another client did not seal for this client and round"
        ) from error


def split_secret(
    secret: bytes, threshold: int, holders: Iterable[str]
) -> dict[str, bytes]:
    """Split a secret into a share for each holder (Shamir 1979).

    ``threshold`` shares recover the secret, and fewer contain nothing of it. The shares
    are numbered from 1 in the order of the holders; `combine_shares` needs the numbers.
    """
    names = list(holders)
    shares = Shamir.split(threshold, len(names), secret, ssss=False)
    return {name: share for name, (_, share) in zip(names, shares, strict=True)}


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Recover the secret from ``threshold`` shares, by their number."""
    return bytes(Shamir.combine(list(shares.items()), ssss=False))


def _private_key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derived(secret, b"X25519"))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    info = b"knnper secure aggregation, " + purpose
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(secret)
