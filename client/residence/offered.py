"""Which of the site's own examples a memory was ever given.

An example that was deleted, or evicted, does not come back with the next model.
"""

import hashlib
import json
from collections.abc import Iterable

from client.residence.errors import ResidenceError
from client.residence.places import Places
from datastore.folder import read_identity
from knnper.data.site.site_data import NamedExamples
from knnper.durable_files import write_atomically

_DIGITS = 24  # of SHA-256: names themselves may tell of whoever was deleted


class Offered:
    """The names that were offered to the store that is there.

    Parameters
    ----------
    places
        The client's state folder, with a store.
    """

    def __init__(self, places: Places) -> None:
        self._path = places.offered
        self._store_id = read_identity(places.store).store_id
        self._digests = self._read()

    def __contains__(self, name: str) -> bool:
        return _digest(name) in self._digests

    def add(self, names: Iterable[str]) -> None:
        """Note more names, for good."""
        self._digests.update(_digest(name) for name in names)
        self._write()

    def withdraw(self, names: Iterable[str]) -> None:
        """Let names come back that left only because they are tested on now."""
        self._digests.difference_update(_digest(name) for name in names)
        self._write()

    def _write(self) -> None:
        document = {"store": self._store_id, "names": sorted(self._digests)}
        write_atomically(self._path, json.dumps(document))

    def _read(self) -> set[str]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            # Of a store that was removed nothing is remembered.
            same = document["store"] == self._store_id
            return set(document["names"]) if same else set()
        except FileNotFoundError:
            return set()
        except (ValueError, KeyError, TypeError) as error:
            raise ResidenceError(
                f"{self._path} is damaged; remove it, after which examples that were "
                "deleted from the store are added again if they are in the data"
            ) from error


def names_of(*splits: NamedExamples) -> tuple[str, ...]:
    """Return the names of all examples, in order."""
    return tuple(name for split in splits for name in split.names)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
