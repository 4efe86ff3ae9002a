"""Seconds and memory for splitting a LEAF file of 3,500 users into clients.

All samples are written to arrays in the data cache, as in the first run with a data
set. The baseline is `json.load` of the same file, which holds it in memory without
splitting. Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.measurement import (
    Measurement,
    make_parser,
    peak_megabytes,
    rounded,
    say,
    seconds_of,
)

NUM_PIXELS = 784
NUM_CLASSES = 62
NUM_IMAGES = 200
FRACTION_INK = 0.2


def write_leaf_file(path: Path, num_users: int, num_samples: int) -> None:
    """Write a FEMNIST of random images with 80 % white pixels."""
    # Imported late, since it loads torch, which the baseline's process must not.
    from knnper.seeding import RandomKey

    names = [f"f{number:04d}_00" for number in range(num_users)]
    images = _image_texts(RandomKey(0, ("benchmark", "leaf images")).numpy())
    generator = RandomKey(0, ("benchmark", "leaf users")).numpy()
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        counts = json.dumps([num_samples] * num_users)
        file.write(f'{{"users": {json.dumps(names)}, "num_samples": {counts}')
        file.write(', "user_data": {')
        for number, name in enumerate(names):
            chosen = generator.integers(0, NUM_IMAGES, num_samples)
            labels = generator.integers(0, NUM_CLASSES, num_samples).tolist()
            x = ", ".join(images[at] for at in chosen)
            file.write(", " if number else "")
            file.write(f'"{name}": {{"x": [{x}], "y": {json.dumps(labels)}}}')
        file.write("}}")


def _image_texts(generator: np.random.Generator) -> list[str]:
    """Format images like LEAF: 784 numbers, 1.0 for white pixels."""
    pixels = generator.integers(0, 256, (NUM_IMAGES, NUM_PIXELS))
    pixels[generator.random(pixels.shape) >= FRACTION_INK] = 255
    return [json.dumps(image) for image in (pixels / 255).tolist()]


@dataclass(frozen=True)
class LeafReading:
    """Seconds of reading a file, and peak memory of the process."""

    seconds: float  # without imports
    cpu_seconds: float  # CPU time of the process
    before: float  # peak megabytes before reading
    end: float


def reading_of(file: Path, cache: Path, *, is_plain: bool) -> LeafReading:
    """Read in a fresh process, with our reader or with Python's `json`.

    The file must be alone in its folder, and the cache folder must not exist.
    """
    command = [sys.executable, "-m", "benchmarks.leaf_reading"]
    ended = subprocess.run(
        [*command, "--plain" if is_plain else "--ours", str(file)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "KNNPER_CACHE": str(cache)},
    )
    return LeafReading(**json.loads(ended.stdout))


def ours_here(file: Path) -> LeafReading:
    """Split the file into arrays on disk, like a run."""
    from knnper.data.leaf import LeafSettings

    settings = LeafSettings(root=str(file.parent))
    return _measured(lambda: settings.load())


def plain_here(file: Path) -> LeafReading:
    """Load the file with `json`."""
    with file.open(encoding="utf-8") as opened:
        return _measured(lambda: json.load(opened))


def _measured(read: Callable[[], object]) -> LeafReading:
    before, computed = peak_megabytes(), time.process_time()
    seconds = seconds_of(read)
    return LeafReading(
        seconds, time.process_time() - computed, before, peak_megabytes()
    )


def measure(
    num_users: int, num_samples: int, repetitions: int, parent: Path | None
) -> list[Measurement]:
    """Measure seconds and peaks of both; the file is in the system's cache."""
    folder = Path(tempfile.mkdtemp(prefix="knnper-leaf-", dir=parent))
    try:
        say("leaf_reading: writing the file")
        file = folder / "all_data" / "all_data_0.json"
        write_leaf_file(file, num_users, num_samples)
        our_readings: list[LeafReading] = []
        plain: list[LeafReading] = []
        for number in range(repetitions):
            say(f"leaf_reading: repetition {number + 1} of {repetitions}")
            cache = folder / f"cache-{number}"
            our_readings.append(reading_of(file, cache, is_plain=False))
            plain.append(reading_of(file, cache, is_plain=True))
        details: dict[str, object] = {
            "users": num_users,
            "samples": num_users * num_samples,
            "file_megabytes": rounded(file.stat().st_size / 1e6),
            "cpu_seconds": _beside(
                lambda reading: reading.cpu_seconds, our_readings, plain
            ),
            "megabytes_before": _beside(
                lambda reading: reading.before, our_readings, plain
            ),
        }
    finally:
        shutil.rmtree(folder)
    return [
        _compared(
            "leaf_reading_s",
            lambda reading: reading.seconds,
            our_readings,
            plain,
            details,
        ),
        _compared(
            "leaf_reading_megabytes",
            lambda reading: reading.end,
            our_readings,
            plain,
            details,
        ),
    ]


def _compared(
    name: str,
    figure: Callable[[LeafReading], float],
    our_readings: Sequence[LeafReading],
    plain: Sequence[LeafReading],
    details: dict[str, object],
) -> Measurement:
    values = list(map(figure, our_readings))
    baselines = list(map(figure, plain))
    ratio = statistics.median(values) / statistics.median(baselines)
    details = {**details, "ratio": rounded(ratio)}
    return Measurement(name, values, baselines, "json.load of the same file", details)


def _beside(
    figure: Callable[[LeafReading], float],
    our_readings: Sequence[LeafReading],
    plain: Sequence[LeafReading],
) -> dict[str, float]:
    """Return the medians of an additional figure."""
    both = {"ours": our_readings, "baseline": plain}
    return {
        whose: rounded(statistics.median(map(figure, readings)))
        for whose, readings in both.items()
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--users", type=int, default=3500)
    parser.add_argument(
        "--samples",
        type=int,
        default=20,
        help="images of each user; json.load needs 130 MB for each (default: 20)",
    )
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    # For the fresh processes: the file to read.
    for reader in ("--ours", "--plain"):
        parser.add_argument(reader, type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    if options.ours or options.plain:
        reading = (
            plain_here(options.plain) if options.plain else ours_here(options.ours)
        )
        print(json.dumps(asdict(reading)))
        return
    figures = measure(
        options.users, options.samples, options.repetitions, options.folder
    )
    for line in figures:
        print(line.as_json())


if __name__ == "__main__":
    main()
