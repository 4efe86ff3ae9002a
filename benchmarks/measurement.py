"""Common parts of all benchmarks: options, interleaved measurements, JSON lines."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Measurement:
    """A figure of a benchmark, measured once per repetition."""

    name: str
    values: Sequence[float]
    baselines: Sequence[float]  # interleaved with the values in the same run
    baseline_is: str  # description and unit
    details: dict[str, object] = field(default_factory=dict)  # such as {"clients": 200}

    def as_json(self) -> str:
        """Format the medians of values and baselines, and the range of the values."""
        document = {
            "name": self.name,
            "value": rounded(statistics.median(self.values)),
            "baseline": rounded(statistics.median(self.baselines)),
            "spread": [rounded(min(self.values)), rounded(max(self.values))],
            "repetitions": len(self.values),
            "baseline_is": self.baseline_is,
            **self.details,
        }
        return json.dumps(document)


@dataclass(frozen=True)
class Turns:
    """Seconds of two alternating tasks."""

    values: Sequence[float]
    baselines: Sequence[float]

    def ratios(self) -> list[float]:
        """Return value / baseline of each repetition."""
        return [
            value / baseline
            for value, baseline in zip(self.values, self.baselines, strict=True)
        ]

    def differences(self) -> list[float]:
        """Return value - baseline of each repetition."""
        return [
            value - baseline
            for value, baseline in zip(self.values, self.baselines, strict=True)
        ]


def in_turn(
    value: Callable[[], float], baseline: Callable[[], float], repetitions: int
) -> Turns:
    """Measure two tasks alternately; the first turn only warms up."""
    pairs = [(value(), baseline()) for _ in range(repetitions + 1)][1:]
    return Turns([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def seconds_of(work: Callable[[], object]) -> float:
    """Measure the duration of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_megabytes() -> float:
    """Return the peak memory of this process so far. Linux only.

    Reads VmHWM, since `getrusage` would include the memory of the parent process.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def rounded(number: float) -> float:
    """Return ``number`` with four significant digits."""
    return float(f"{number:.4g}")


def make_parser(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """Return a parser with the common options of all benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=repetitions,
        help="how often the figure is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        metavar="ROOT",
        default="",
        help="train on the images below ROOT/train/CLASS and ROOT/test/CLASS, of 32x32 "
        "pixels in ten classes, instead of random ones",
    )
    return parser


def say(text: str) -> None:
    """Print progress to stderr, apart from the figures."""
    print(text, file=sys.stderr, flush=True)
