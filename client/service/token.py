"""The secret that whoever uses the service has to know."""

import hmac
import os
import secrets
from pathlib import Path

from knnper.config.errors import RunError

_MIN_LENGTH = 16
_OTHERS = 0o077  # may read, write or execute: group and others


def read_or_create_token(path: Path) -> str:
    """Return the token in a file; a new one, readable by its owner only, if none is.

    Raises
    ------
    RunError
        If the file cannot be read or written, others may read it, or what is in it is
        too short to be a secret.
    """
    try:
        _create(path)
        mode, token = path.stat().st_mode, path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"the token file {path} cannot be used: {error}; mend it, or remove it to "
            "get a new token"
        ) from error
    if mode & _OTHERS:
        raise RunError(
            f"the token file {path} can be used by other accounts, found mode "
            f"{mode & 0o777:04o}, expected 0600; run: chmod 600 {path}"
        )
    if len(token) < _MIN_LENGTH:
        raise RunError(
            f"the token in {path} has {len(token)} characters, expected at least "
            f"{_MIN_LENGTH}; remove the file to get a new token"
        )
    return token


def _create(path: Path) -> None:
    """Write a new token, whole or not at all, unless there is one."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if not path.exists():
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def is_authorized(header: bytes | None, token: str) -> bool:
    """Whether an ``Authorization`` header is ``Bearer`` and the token.

    The comparison takes as long for a token that is nearly right as for any other.
    """
    scheme, _, found = (header or b"").partition(b" ")
    matches = hmac.compare_digest(found.strip(), token.encode("ascii"))
    return matches and scheme.lower() == b"bearer"
