"""How long the files took, over all the times that something of them was made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.durable_files import JsonLines
from server.manifest import environment
from simulation.reproducing.protocols import RUNS, SECONDS
from simulation.result_files import RESULT_FILES

Marks = frozenset[tuple[str, int]]


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

    def begin(self, name: str) -> Marks:
        """Return what a file has before it is played, for `note`.

        Where its folder was emptied, the seconds that went into it are forgotten.
        """
        if not _marks(self.output / name):
            records = self._lines.read()
            kept = [
                one for one in records if one["name"] != name or not _is_in_folder(one)
            ]
            if len(kept) < len(records):
                self._lines.replace(kept)
        return self._marks_of(name)

    def note(self, name: str, seconds: float, before: Marks) -> None:
        """Keep how long a file was played, if something was made.

        To look at what is done takes seconds too.
        """
        if self._marks_of(name) == before:
            return
        record = {
            "name": name,
            "seconds": round(seconds, 3),
            "in_folder": bool(_marks(self.output / name)),
            "environment": environment(),
        }
        self._lines.append(record)

    def making_of(self, name: str) -> Making:
        """Return what is known of the file with this name."""
        found = [record for record in self._lines.read() if record["name"] == name]
        seconds = sum(float(record["seconds"]) for record in found)
        return Making(seconds, found[-1]["environment"] if found else environment())

    def _marks_of(self, name: str) -> Marks:
        # The training of a figure is not in its folder.
        return _marks(self.output / name) | _marks(self.output / RUNS)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.output / SECONDS)


def _marks(folder: Path) -> Marks:
    """Return which results are below a folder, and when each was written."""
    return frozenset(
        (str(path), path.stat().st_mtime_ns)
        for name in RESULT_FILES
        for path in folder.rglob(name)
    )


def _is_in_folder(record: Mapping[str, Any]) -> bool:
    """Return whether what was made was left in the file's folder."""
    return bool(record.get("in_folder", True))
