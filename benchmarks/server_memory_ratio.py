"""Peak memory of the server with many replies of 9 MB in a round, over that with few.

The server makes two rounds in a fresh process, with clients that only return the
MobileNetV2 they are sent. The baseline is the same ratio of Flower's FedAvg for ten
times the clients, at smaller numbers: it keeps all replies. Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

from flwr.serverapp import Grid

from benchmarks import stock
from benchmarks.measurement import (
    Measurement,
    make_parser,
    peak_megabytes,
    rounded,
    say,
)
from benchmarks.real_apps_stock import make_rounds
from benchmarks.rounds import rounds_of
from benchmarks.workload import Workload, on_flower
from knnper.server.federation import Federation
from knnper.simulation.workbench import Workbench

NUM_ROUNDS = 2


@dataclass(frozen=True)
class Peaks:
    """The most memory that a process has held so far, in megabytes."""

    before: float  # the first round
    end: float  # after the last one

    @property
    def growth(self) -> float:
        """What the rounds took beyond what was there before."""
        return self.end - self.before


def peaks_of(workload: Workload, *, is_stock: bool) -> Peaks:
    """Make the rounds in a fresh process."""
    whose = "Flower's FedAvg" if is_stock else "ours"
    say(f"server_memory_ratio: {workload.num_clients} clients, {whose}")
    command = [sys.executable, "-m", "benchmarks.server_memory_ratio"]
    command += ["--stock" if is_stock else "--ours", json.dumps(asdict(workload))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Peaks(**json.loads(ended.stdout))


def peaks_here(workload: Workload) -> Peaks:
    """Make rounds as a run makes them."""

    def lead(bench: Workbench, federation: Federation) -> Peaks:
        before = peak_megabytes()
        with rounds_of(bench, federation) as rounds:
            for _ in range(NUM_ROUNDS):
                rounds.make_one()
        return Peaks(before, peak_megabytes())

    return on_flower(workload, lead)


def stock_peaks_here(workload: Workload) -> Peaks:
    """Make rounds with Flower's FedAvg."""
    bench, num_clients = workload.workbench(), workload.num_clients
    tensors = bench.task.model.named(bench.task.initial_weights)

    def lead(grid: Grid) -> Peaks:
        stock.warm_up(grid, num_clients)
        before = peak_megabytes()
        make_rounds(grid, tensors, num_clients, NUM_ROUNDS)
        return Peaks(before, peak_megabytes())

    return stock.on_stock_flower(num_clients, bench.experiment.run, lead)


@dataclass(frozen=True)
class _Pair:
    """The peaks with few clients and with ten times as many."""

    few: Peaks
    many: Peaks

    @property
    def ratio(self) -> float:
        return self.many.end / self.few.end


def measure(workload: Workload, num_stock: int, repetitions: int) -> Measurement:
    """Return the ratio of the peaks of many clients and a tenth of them.

    Flower's FedAvg has ``num_stock`` of them in place of the workload's.
    """
    ours: list[_Pair] = []
    theirs: list[_Pair] = []
    for _ in range(repetitions):
        ours.append(_pair(workload, is_stock=False))
        theirs.append(_pair(replace(workload, num_clients=num_stock), is_stock=True))
    baseline_is = f"the ratio of FedAvg.start with {num_stock} to {num_stock // 10}"
    return Measurement(
        "server_memory_ratio",
        [pair.ratio for pair in ours],
        [pair.ratio for pair in theirs],
        baseline_is,
        {
            **_details("ours", workload.num_clients, ours),
            **_details("baseline", num_stock, theirs),
        },
    )


def _pair(many: Workload, *, is_stock: bool) -> _Pair:
    few = replace(many, num_clients=many.num_clients // 10)
    return _Pair(peaks_of(few, is_stock=is_stock), peaks_of(many, is_stock=is_stock))


def _details(whose: str, num_many: int, pairs: list[_Pair]) -> dict[str, object]:
    by_number = {
        num_many // 10: [pair.few for pair in pairs],
        num_many: [pair.many for pair in pairs],
    }
    return {
        f"{whose}_megabytes": {
            str(number): _megabytes(peaks) for number, peaks in by_number.items()
        }
    }


def _megabytes(peaks: list[Peaks]) -> dict[str, float]:
    return {
        "peak": rounded(statistics.median(one.end for one in peaks)),
        "growth": rounded(statistics.median(one.growth for one in peaks)),
    }


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=1)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--stock-clients", type=int, default=100)
    # A fresh process is told a `Workload` as JSON, and makes its rounds alone.
    for whose in ("--ours", "--stock"):
        parser.add_argument(whose, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    if given.ours or given.stock:
        alone = Workload(**json.loads(given.stock or given.ours))
        peaks = stock_peaks_here(alone) if given.stock else peaks_here(alone)
        print(json.dumps(asdict(peaks)))
        return
    workload = Workload(given.clients, echoes=True, images=given.images)
    figures = measure(workload, given.stock_clients, given.repetitions)
    print(figures.as_json())


if __name__ == "__main__":
    main()
