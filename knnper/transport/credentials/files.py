"""Files that hold credentials: written once, read with errors that say what to do."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import UnsupportedAlgorithm

from knnper.config.errors import CredentialError

SECRET = 0o600
PUBLIC = 0o644

T = TypeVar("T")


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write ``content`` to the new file ``path`` with the permissions ``mode``.

    The process's umask takes away from them.

    Raises
    ------
    CredentialError
        If there is such a file already: no credential is ever overwritten.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise CredentialError(
            f"{path} exists already; credentials are never overwritten. Move it away, "
            "or choose another folder"
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read_as(path: Path, what: str, parse: Callable[[bytes], T]) -> T:
    """Return what ``parse`` makes of the content of ``path``.

    Parameters
    ----------
    path
        The file.
    what
        What it should hold, with the way to make one, for the error's text.
    parse
        Raises ValueError or TypeError for content of another kind.

    Raises
    ------
    CredentialError
        If the file is missing, unreadable or holds something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CredentialError(f"there is no file {path}; expected {what}") from error
    except OSError as error:
        raise CredentialError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return parse(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialError(f"{path} does not hold {what} ({error})") from error


def permission_problem(path: Path) -> str | None:
    """Return what is wrong with the permissions of the secret ``path``, if anything."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 == 0:
        return None
    return f"{path} can be read by other users (mode {mode:04o}); run: chmod 600 {path}"
