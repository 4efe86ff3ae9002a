"""Seconds and memory in which a LEAF file of 3,500 users is split into clients.

All samples go into arrays in the data cache, as on the first run with a data set. The
baseline is `json.load` of the same file, which keeps it in memory and splits nothing.
Linux only.
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import make_parser, say
from benchmarks.leaf_file import write_leaf_file
from benchmarks.leaf_process import Reading, reading_of
from benchmarks.measurement import Measurement, rounded


def measure(
    num_users: int, num_samples: int, repetitions: int, parent: Path | None
) -> list[Measurement]:
    """Return the seconds and the peaks of both; the file is in the system's cache.

    Parameters
    ----------
    num_users, num_samples
        Users in the file, and images of each.
    parent
        On the disk where the file and the cache are.
    """
    folder = Path(tempfile.mkdtemp(prefix="knnper-leaf-", dir=parent))
    try:
        say("leaf_reading: writing the file")
        file = folder / "all_data" / "all_data_0.json"
        write_leaf_file(file, num_users, num_samples)
        ours: list[Reading] = []
        plain: list[Reading] = []
        for number in range(repetitions):
            say(f"leaf_reading: repetition {number + 1} of {repetitions}")
            cache = folder / f"cache-{number}"
            ours.append(reading_of(file, cache, is_plain=False))
            plain.append(reading_of(file, cache, is_plain=True))
        details: dict[str, object] = {
            "users": num_users,
            "samples": num_users * num_samples,
            "file_megabytes": rounded(file.stat().st_size / 1e6),
            "cpu_seconds": _beside(lambda one: one.cpu_seconds, ours, plain),
            "megabytes_before": _beside(lambda one: one.before, ours, plain),
        }
    finally:
        shutil.rmtree(folder)
    return [
        _compared("leaf_reading_s", lambda one: one.seconds, ours, plain, details),
        _compared("leaf_reading_megabytes", lambda one: one.end, ours, plain, details),
    ]


def _compared(
    name: str,
    figure: Callable[[Reading], float],
    ours: Sequence[Reading],
    plain: Sequence[Reading],
    details: dict[str, object],
) -> Measurement:
    values, baselines = [figure(one) for one in ours], [figure(one) for one in plain]
    ratio = statistics.median(values) / statistics.median(baselines)
    details = {**details, "ratio": rounded(ratio)}
    return Measurement(name, values, baselines, "json.load of the same file", details)


def _beside(
    figure: Callable[[Reading], float],
    ours: Sequence[Reading],
    plain: Sequence[Reading],
) -> dict[str, float]:
    """Return the medians of something else that was measured."""
    both = {"ours": ours, "baseline": plain}
    return {
        whose: rounded(statistics.median(map(figure, readings)))
        for whose, readings in both.items()
    }


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--users", type=int, default=3500)
    parser.add_argument(
        "--samples",
        type=int,
        default=20,
        help="images of each user; json.load needs 130 MB for each (default: 20)",
    )
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    figures = measure(given.users, given.samples, given.repetitions, given.folder)
    for one in figures:
        print(one.as_json())


if __name__ == "__main__":
    main()
