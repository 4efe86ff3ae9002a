"""The clients that may connect: a folder with one public key ``NAME.pub`` each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from knnper.config.errors import CredentialError, RunError
from knnper.config.names import is_name
from knnper.transport.credentials.node_keys import (
    fingerprint,
    read_public_key,
    write_public_key,
)

_SUFFIX = ".pub"

Snapshot = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class AuthorizedFolder:
    """The folder; changes in it take effect while the server runs.

    Attributes
    ----------
    path
        The folder.
    """

    path: Path

    def names(self) -> list[str]:
        """Return the names of all clients in the folder, sorted; some may be wrong."""
        return sorted(file.name.removesuffix(_SUFFIX) for file in self._files())

    def key(self, name: str) -> ec.EllipticCurvePublicKey:
        """Return the public key of the client ``name``.

        Raises
        ------
        CredentialError
            If the name is not allowed, or there is no such file with a key.
        """
        require_name(name)
        return read_public_key(self._file(name))

    def keys(self) -> tuple[Mapping[str, ec.EllipticCurvePublicKey], list[str]]:
        """Return all clients' keys by name, and what is wrong with other files.

        Where two files hold the same key, the first by name counts.
        """
        keys: dict[str, ec.EllipticCurvePublicKey] = {}
        owners: dict[str, str] = {}
        problems = []
        for name in self.names():
            try:
                key = self.key(name)
                owner = owners.setdefault(fingerprint(key), name)
                if owner != name:
                    raise CredentialError(_key_twice(name, owner))
            except CredentialError as error:
                problems.append(str(error))
            else:
                keys[name] = key
        return keys, problems

    def add(self, name: str, key: ec.EllipticCurvePublicKey) -> None:
        """Let the client ``name`` with ``key`` in.

        Raises
        ------
        CredentialError
            If the name is not allowed or taken, or another name has this key.
        """
        require_name(name)
        if self._file(name).exists():
            raise CredentialError(
                f"the name {name} is taken by the key {fingerprint(self.key(name))}; "
                "a name is one key. Choose another name, or replace the client: "
                f"knnper federation remove-client FOLDER {name}"
            )
        for other, known in self.keys()[0].items():
            if fingerprint(known) == fingerprint(key):
                raise CredentialError(_key_twice(name, other))
        self.path.mkdir(parents=True, exist_ok=True)
        write_public_key(self._file(name), key)

    def remove(self, name: str) -> None:
        """Let the client ``name`` in no longer.

        Raises
        ------
        CredentialError
            If the name is not allowed.
        RunError
            If there is no such client.
        """
        require_name(name)
        try:
            self._file(name).unlink()
        except FileNotFoundError as error:
            known = ", ".join(self.names()) or "none"
            message = f"there is no client {name} in {self.path}; known: {known}"
            raise RunError(message) from error

    def snapshot(self) -> Snapshot | None:
        """Return something that differs when a file changed; None without a folder."""
        try:
            entries = [(entry.name, entry.stat()) for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return None
        return tuple(
            sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in entries)
        )

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return [file for file in self.path.iterdir() if file.suffix == _SUFFIX]

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{_SUFFIX}"


def require_name(name: str) -> None:
    """Refuse ``name`` for a client unless it can name a file as well.

    Raises
    ------
    CredentialError
        If it is not allowed.
    """
    if not is_name(name):
        raise CredentialError(
            f"{name!r} cannot be a client's name; expected letters, digits, '.', '_' "
            "and '-', a letter or digit first"
        )


def _key_twice(name: str, owner: str) -> str:
    return (
        f"the key of {name} is already that of {owner}; a client is one name with one "
        "key. Make another key, or remove the other client: knnper federation "
        f"remove-client FOLDER {owner}"
    )
