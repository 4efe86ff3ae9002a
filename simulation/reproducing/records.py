"""How long each file took, over all the times that it was played."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.durable_files import JsonLines
from server.manifest import environment
from simulation.reproducing.protocols import Protocol

_FILE = "seconds.jsonl"


@dataclass(frozen=True)
class Making:
    """What is known of how a file's results were made.

    Attributes
    ----------
    seconds
        In all, until it was done.
    environment
        Versions and machine of the last time that something was made.
    """

    seconds: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """The record of an output folder.

    Attributes
    ----------
    output
        The folder; it must exist.
    """

    output: Path

    def note(self, protocol: Protocol, seconds: float, *, done: bool) -> None:
        """Keep how long a file was played; not once the same file was done before.

        To look at what is done takes seconds too, in which nothing is made.
        """
        digest = hashlib.sha256(protocol.text.encode()).hexdigest()
        if self._is_done(protocol.name, digest):
            return
        record = {
            "name": protocol.name,
            "file": digest,
            "seconds": round(seconds, 3),
            "done": done,
            "environment": environment(),
        }
        self._lines.append(record)

    def making_of(self, name: str) -> Making:
        """Return what is known of the file with this name."""
        found = [record for record in self._lines.read() if record["name"] == name]
        seconds = sum(float(record["seconds"]) for record in found)
        return Making(seconds, found[-1]["environment"] if found else environment())

    def _is_done(self, name: str, digest: str) -> bool:
        return any(
            record["done"] and (record["name"], record["file"]) == (name, digest)
            for record in self._lines.read()
        )

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.output / _FILE)
