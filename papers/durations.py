"""Records of the time that the files of an output folder took."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.files import JsonLines
from knnper.server.run_folder import environment
from knnper.simulation.reports.finished_run import RESULT_FILES
from papers.files import RUNS, SECONDS

# Result files and their times of modification, by which new results are recognised.
Marks = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class TimeSpent:
    """Total seconds of a file, and the latest versions and machine."""

    seconds: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class TimeRecords:
    """Records of the time taken by the files of an output folder."""

    output: Path

    def begin(self, name: str) -> Marks:
        """Return the state of a file's results before it is made, for `note`."""
        if not _marks(self.output / name):
            records = self._lines.read()
            outdated = [record for record in records if record["name"] == name]
            outdated = [record for record in outdated if record.get("in_folder", True)]
            if outdated:
                self._lines.replace(
                    [record for record in records if record not in outdated]
                )
        return self._marks_of(name)

    def note(self, name: str, seconds: float, before: Marks) -> None:
        """Record the time of a file, unless nothing new was made."""
        if self._marks_of(name) == before:
            return
        record = {
            "name": name,
            "seconds": round(seconds, 3),
            "in_folder": bool(_marks(self.output / name)),
            "environment": environment(),
        }
        self._lines.append(record)

    def time_of(self, name: str) -> TimeSpent:
        """Return the recorded time and environment of a file."""
        records = [record for record in self._lines.read() if record["name"] == name]
        seconds = sum(float(record["seconds"]) for record in records)
        return TimeSpent(
            seconds, records[-1]["environment"] if records else environment()
        )

    def _marks_of(self, name: str) -> Marks:
        # The training of a figure has a folder of its own.
        return _marks(self.output / name) | _marks(self.output / RUNS)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.output / SECONDS)


def _marks(folder: Path) -> Marks:
    """Return the results below a folder and their times of modification."""
    return frozenset(
        (str(path), path.stat().st_mtime_ns)
        for name in RESULT_FILES
        for path in folder.rglob(name)
    )
