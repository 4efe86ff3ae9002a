"""The clients that may connect: a folder with one public key ``NAME.pub`` each.

A file ``NAME.num_train`` beside it fixes the client's number of training examples,
where the operator knows it and need not rely on the client's claim.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from knnper.errors import CredentialError, RunError
from knnper.files import parse_json, read_file, write_atomically
from knnper.settings import LARGEST_COUNT, is_name
from knnper.transport.credentials import fingerprint, read_public_key, write_public_key

_SUFFIX = ".pub"
_COUNT_SUFFIX = ".num_train"
Snapshot = tuple[tuple[str, int, int], ...]
_FORMAT = 1


@dataclass(frozen=True)
class AuthorizedFolder:
    """The folder; changes in it take effect while the server runs."""

    path: Path

    def names(self) -> list[str]:
        """Return the sorted names of all key files; they need not be valid."""
        files = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(file.stem for file in files if file.suffix == _SUFFIX)

    def key(self, name: str) -> ec.EllipticCurvePublicKey:
        """Read the public key of the client ``name``."""
        require_name(name)
        return read_public_key(self._file(name))

    def keys(self) -> tuple[Mapping[str, ec.EllipticCurvePublicKey], list[str]]:
        """Return the valid keys by client, and the problems of other files."""
        keys: dict[str, ec.EllipticCurvePublicKey] = {}
        owners: dict[str, str] = {}
        problems = []
        for name in self.names():
            try:
                key = self.key(name)
                owner = owners.setdefault(fingerprint(key), name)
                if owner != name:
                    raise CredentialError(_duplicate_key(name, owner))
            except CredentialError as error:
                problems.append(str(error))
            else:
                keys[name] = key
        return keys, problems

    def counts(self) -> tuple[Mapping[str, int], list[str]]:
        """Return the fixed numbers by client, and the problems of other files."""
        counts, problems = {}, []
        for name in self.names():
            file = self._count_file(name)
            if not file.exists():
                continue
            text = read_file(file).decode(errors="replace").strip()
            if re.fullmatch("[1-9][0-9]{0,15}", text):
                counts[name] = min(int(text), LARGEST_COUNT)
            else:
                expected = "expected a number of training examples, as in 1200"
                problems.append(f"{file}: {expected}, found {text[:40]!r}")
        return counts, problems

    def add(
        self, name: str, key: ec.EllipticCurvePublicKey, num_train: int | None = None
    ) -> None:
        """Authorize a new client.

        Raises
        ------
        CredentialError
            The name or the key is invalid or taken.
        """
        require_name(name)
        if num_train is not None and not 1 <= num_train <= LARGEST_COUNT:
            expected = "expected a number of training examples"
            raise CredentialError(f"{expected}, found {num_train}")
        if self._file(name).exists():
            problem = f"the name {name} is taken by {fingerprint(self.key(name))}"
            fix = (
                "choose another name; to give this client another key: knnper fed "
                f"rotate-key FEDERATION {name}"
            )
            raise CredentialError(f"{problem}; {fix}")
        for other, known in self.keys()[0].items():
            if fingerprint(known) == fingerprint(key):
                raise CredentialError(_duplicate_key(name, other))
        self.path.mkdir(parents=True, exist_ok=True)
        if num_train is not None:
            write_atomically(self._count_file(name), f"{num_train}\n")
        write_public_key(self._file(name), key)

    def replace(self, name: str, key: ec.EllipticCurvePublicKey) -> None:
        """Replace the key of the client ``name``."""
        self.require_known(name)
        for other, known in self.keys()[0].items():
            if fingerprint(known) == fingerprint(key):
                raise CredentialError(_duplicate_key(name, other))
        draft = self.path / f".{name}{_SUFFIX}.new"
        draft.unlink(missing_ok=True)  # of an interrupted call
        write_public_key(draft, key)
        draft.replace(self._file(name))

    def remove(self, name: str) -> None:
        """Revoke the client ``name``."""
        self.require_known(name)
        self._file(name).unlink()
        self._count_file(name).unlink(missing_ok=True)

    def require_known(self, name: str) -> None:
        """Raise `RunError` if there is no client ``name``."""
        require_name(name)
        if not self._file(name).exists():
            known = ", ".join(self.names()) or "none"
            raise RunError(f"there is no client {name} in {self.path}; known: {known}")

    def snapshot(self) -> Snapshot | None:
        """Return a value that changes with any file; None without a folder."""
        try:
            entries = [(entry.name, entry.stat()) for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return None
        states = (
            (name, status.st_mtime_ns, status.st_size) for name, status in entries
        )
        return tuple(sorted(states))

    def _count_file(self, name: str) -> Path:
        return self.path / f"{name}{_COUNT_SUFFIX}"

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{_SUFFIX}"


def require_name(name: str) -> None:
    """Raise `CredentialError` if ``name`` is not also a valid file name."""
    if not is_name(name):
        expected = (
            "expected letters, digits, '.', '_' and '-', not '.', '_' or '-' first"
        )
        raise CredentialError(f"{name!r} cannot be a client's name; {expected}")


def _duplicate_key(name: str, owner: str) -> str:
    fix = f"make another, or: knnper fed remove-client FEDERATION {owner}"
    return f"the key of {name} is already that of {owner}; {fix}"


@dataclass(frozen=True)
class Registered:
    """A client that may connect; ``num_train`` is the number that was fixed, if any."""

    name: str
    key_sha256: str
    num_train: int | None = None


def write_roster(path: Path, nodes: Mapping[str, Registered]) -> None:
    """Write the registered clients, by node id, to a file."""
    entries = {node_id: asdict(client) for node_id, client in sorted(nodes.items())}
    text = json.dumps({"format": _FORMAT, "nodes": entries}, indent=2)
    write_atomically(path, f"{text}\n")


def read_roster(path: Path) -> dict[str, Registered]:
    """Read the registered clients by node id; none without a file."""
    if not path.exists():
        return {}
    try:
        document = parse_json(read_file(path))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r}, expected {_FORMAT}")
        return {
            node_id: Registered(**entry) for node_id, entry in document["nodes"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore a copy, or remove it: the server "
            "writes a new one"
        ) from error
