"""A state folder is one client's: it is never taken over by another."""

import json
from collections.abc import Mapping
from typing import Any

from client.residence.errors import ResidenceError
from client.residence.places import Places
from knnper.durable_files import write_atomically
from knnper.private_folders import make_private


def claim(places: Places, name: str, key_sha256: str | None) -> None:
    """Make the folder that of a client, or refuse it.

    Parameters
    ----------
    places
        The folder; created if it is missing, and closed to other users.
    name
        The client's.
    key_sha256
        Of its public key, in hexadecimal; None where none is used: the first one that
        is counts from then on.

    Raises
    ------
    ResidenceError
        If the folder is another client's, or cannot be written.
    """
    try:
        make_private(places.folder)
        with places.committing():
            _claim(places, name, key_sha256)
    except OSError as error:
        raise ResidenceError(
            f"{places.folder} cannot be written ({error}); give this user the right to "
            "write there, or set another `state` in the client's file"
        ) from error


def require_own(places: Places, name: str, key_sha256: str | None) -> None:
    """Refuse a folder that is another client's; write nothing.

    Parameters
    ----------
    places, name, key_sha256
        See `claim`.

    Raises
    ------
    ResidenceError
        If it is another's.
    """
    _require_own(_known(places), places, name, key_sha256)


def _claim(places: Places, name: str, key_sha256: str | None) -> None:
    known = _known(places)
    _require_own(known, places, name, key_sha256)
    wanted = {"name": name, "key_sha256": known.get("key_sha256") or key_sha256}
    if wanted != known:
        write_atomically(places.identity, json.dumps(wanted))


def _require_own(
    known: Mapping[str, Any], places: Places, name: str, key_sha256: str | None
) -> None:
    if known.get("name", name) != name:
        raise ResidenceError(
            f"{places.folder} is the state of the client {known['name']!r}, found the "
            f"name {name!r}; give every client a `state` folder of its own"
        )
    key = known.get("key_sha256")
    if None not in (key, key_sha256) and key != key_sha256:
        raise ResidenceError(
            f"{places.folder} is the state of the client {name!r} with the key "
            f"{str(key)[:12]}, found the key {str(key_sha256)[:12]}; bring the key "
            "back, or remove identity.json there once the new key is registered"
        )


def _known(places: Places) -> dict[str, Any]:
    try:
        known = json.loads(places.identity.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(places) from error
    if not isinstance(known, dict):
        raise _damaged(places)
    return known


def _damaged(places: Places) -> ResidenceError:
    return ResidenceError(
        f"{places.identity} is damaged; remove it if {places.folder} is this client's"
    )
