"""What all benchmarks have in common: options, turns, a line of JSON."""

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
    """A figure of a benchmark, measured once a repetition."""

    name: str
    values: Sequence[float]
    baselines: Sequence[float]  # measured in turn with the values in one run
    baseline_is: str  # in words
    details: dict[str, object] = field(default_factory=dict)  # as {"clients": 200}

    def as_json(self) -> str:
        """Return the medians of values and baselines, and the range of the values."""
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
    """Seconds of two things that were done in turn, one after the other."""

    ours: Sequence[float]
    bare: Sequence[float]

    def ratios(self) -> list[float]:
        """Return ours / bare of each repetition."""
        return [one / other for one, other in zip(self.ours, self.bare, strict=True)]

    def differences(self) -> list[float]:
        """Return ours - bare of each repetition."""
        return [one - other for one, other in zip(self.ours, self.bare, strict=True)]


def in_turn(
    ours: Callable[[], float], bare: Callable[[], float], repetitions: int
) -> Turns:
    """Measure two things in turn; a first turn warms both up and is not counted."""
    pairs = [(ours(), bare()) for _ in range(repetitions + 1)][1:]
    return Turns([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_megabytes() -> float:
    """Return the most memory that this process has held so far. Linux only.

    VmHWM: `getrusage` would count what the parent process held.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def rounded(number: float) -> float:
    """Return ``number`` with four significant digits."""
    return float(f"{number:.4g}")


def make_parser(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks take."""
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
    """Tell a person what is going on, where it does not mix with the figures."""
    print(text, file=sys.stderr, flush=True)
