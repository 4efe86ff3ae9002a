"""The cryptographic operations of the protocols, each a call of a library.

Keys of pairs are bytes; other keys, secrets, shares and ciphertexts are text, in
hexadecimal. Secrets are 16 random bytes from the operating system, as long as the
security of X25519 and as a block of Shamir's secret sharing in ``pycryptodome``. Keys
are derived from them with HKDF, each with a text that names its purpose.
"""

import re
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

SHARE_DIGITS = 32
"""Hexadecimal digits of a secret, and of a share of it."""

_SECRET_BYTES = SHARE_DIGITS // 2
_KEY_BYTES = 32
_NONCE_BYTES = 12
_COUNTER_START = bytes(16)


def new_secret() -> str:
    """Return a secret from the operating system's generator."""
    return secrets.token_hex(_SECRET_BYTES)


def public_key(secret: str) -> str:
    """Return the X25519 public key of a secret, 32 bytes."""
    return _private_key(secret).public_key().public_bytes_raw().hex()


def pair_key(secret: str, others_public_key: str, purpose: bytes) -> bytes:
    """Return the key of this client and another client, 32 bytes.

    It is the same for both only if they agree on ``purpose``.
    """
    try:
        other = X25519PublicKey.from_public_bytes(bytes.fromhex(others_public_key))
        return _derived(_private_key(secret).exchange(other), purpose)
    except ValueError as error:
        raise SecureAggregationError(f"found an invalid public key: {error}") from error


def expanded_mask(key: bytes, size: int) -> Words:
    """Expand a key, used once, to a mask of shape (size,): the stream of AES-CTR."""
    stream = Cipher(algorithms.AES(key), modes.CTR(_COUNTER_START)).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), np.dtype("<u4"))


def self_mask(secret: str, size: int) -> Words:
    """Expand a client's self-mask secret to a mask of shape (size,)."""
    return expanded_mask(_derived(bytes.fromhex(secret), b"self mask"), size)


def seal(key: bytes, share: str, context: bytes) -> str:
    """Encrypt and authenticate a share, and authenticate ``context``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = ChaCha20Poly1305(key).encrypt(nonce, bytes.fromhex(share), context)
    return (nonce + sealed).hex()


def open_sealed(key: bytes, sealed: str, context: bytes) -> str:
    """Decrypt the result of `seal`."""
    try:
        content = bytes.fromhex(sealed)
        nonce, ciphertext = content[:_NONCE_BYTES], content[_NONCE_BYTES:]
        return ChaCha20Poly1305(key).decrypt(nonce, ciphertext, context).hex()
    except (InvalidTag, ValueError) as error:
        raise SecureAggregationError(
            "found a share that another client did not seal for this client and round"
        ) from error


def split_secret(secret: str, threshold: int, holders: Iterable[str]) -> dict[str, str]:
    """Split a secret into a share for each holder (Shamir 1979).

    ``threshold`` shares recover the secret, and fewer contain nothing of it. The shares
    are numbered from 1 in the order of the holders; `combine_shares` needs the numbers.
    """
    names = list(holders)
    shares = Shamir.split(threshold, len(names), bytes.fromhex(secret), ssss=False)
    return {name: share.hex() for name, (_, share) in zip(names, shares, strict=True)}


def is_share(text: str) -> bool:
    """Return whether a text of a peer has the form of a share."""
    return re.fullmatch(f"[0-9a-f]{{{SHARE_DIGITS}}}", text) is not None


def combine_shares(shares: Mapping[int, str]) -> str:
    """Recover the secret from ``threshold`` shares, by their number."""
    numbered = [(number, bytes.fromhex(share)) for number, share in shares.items()]
    return bytes(Shamir.combine(numbered, ssss=False)).hex()


def _private_key(secret: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(
        _derived(bytes.fromhex(secret), b"X25519")
    )


def _derived(secret: bytes, purpose: bytes) -> bytes:
    info = b"knnper secure aggregation, " + purpose
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(secret)
