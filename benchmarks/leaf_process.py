"""One reading of a LEAF file, alone in a fresh process.

Prints a line of JSON: the seconds, and the peak in megabytes before and after.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measurement import peak_megabytes, seconds_of


@dataclass(frozen=True)
class Reading:
    """How long a file took, and the most memory that the process has held.

    Attributes
    ----------
    seconds
        Of the reading, without imports.
    cpu_seconds
        The part of them in which the process computed.
    before, end
        Megabytes, before it and after it.
    """

    seconds: float
    cpu_seconds: float
    before: float
    end: float


def reading_of(file: Path, cache: Path, *, is_plain: bool) -> Reading:
    """Read in a fresh process.

    Parameters
    ----------
    file
        Alone in its folder.
    cache
        Where the arrays go: a folder that is not there yet.
    is_plain
        Whether it is Python's `json` that reads.
    """
    command = [sys.executable, "-m", "benchmarks.leaf_process", str(file)]
    ended = subprocess.run(
        [*command, *(["--plain"] if is_plain else [])],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "KNNPER_CACHE": str(cache)},
    )
    return Reading(**json.loads(ended.stdout))


def ours_here(file: Path) -> Reading:
    """Split the file into arrays on disc, as a run does."""
    from knnper.data.leaf import LeafSettings

    settings = LeafSettings(root=str(file.parent))
    return _measured(lambda: settings.load())


def plain_here(file: Path) -> Reading:
    """Load the file with `json`, and do nothing with it."""
    with file.open(encoding="utf-8") as opened:
        return _measured(lambda: json.load(opened))


def _measured(read: Callable[[], object]) -> Reading:
    before, computed = peak_megabytes(), time.process_time()
    seconds = seconds_of(read)
    return Reading(seconds, time.process_time() - computed, before, peak_megabytes())


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plain", action="store_true", help="with Python's json")
    given = parser.parse_args()
    reading = plain_here(given.file) if given.plain else ours_here(given.file)
    print(json.dumps(asdict(reading)))


if __name__ == "__main__":
    main()
