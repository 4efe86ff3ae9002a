"""Ratio of the server's peak memory with many and with few replies of 9 MB in a round.

The server makes two rounds in a fresh process, with clients that return the received
MobileNetV2. The baseline is the same ratio for Flower's FedAvg, with fewer clients,
since it holds all replies. Linux only.
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
    """Peak memory of a process in megabytes."""

    before: float  # before the first round
    end: float  # after the last round

    @property
    def growth(self) -> float:
        """Increase of the peak by the rounds."""
        return self.end - self.before


def peaks_of(workload: Workload, *, is_stock: bool) -> Peaks:
    """Make the rounds in a fresh process."""
    server = "Flower's FedAvg" if is_stock else "ours"
    say(f"server_memory_ratio: {workload.num_clients} clients, {server}")
    command = [sys.executable, "-m", "benchmarks.server_memory_ratio"]
    command += ["--stock" if is_stock else "--ours", json.dumps(asdict(workload))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Peaks(**json.loads(ended.stdout))


def peaks_here(workload: Workload) -> Peaks:
    """Make rounds like a run."""

    def lead(bench: Workbench, federation: Federation) -> Peaks:
        before = peak_megabytes()
        with rounds_of(bench, federation) as rounds:
            for _ in range(NUM_ROUNDS):
                rounds.make_round()
        return Peaks(before, peak_megabytes())

    return on_flower(workload, lead)


def stock_peaks_here(workload: Workload) -> Peaks:
    """Make rounds with Flower's FedAvg."""
    bench = workload.workbench()
    num_clients = workload.num_clients
    tensors = bench.task.model.named(bench.task.initial_weights)

    def lead(grid: Grid) -> Peaks:
        stock.warm_up(grid, num_clients)
        before = peak_megabytes()
        make_rounds(grid, tensors, num_clients, NUM_ROUNDS)
        return Peaks(before, peak_megabytes())

    return stock.on_stock_flower(num_clients, bench.experiment.run, lead)


@dataclass(frozen=True)
class _Pair:
    """Peaks with few clients and with ten times as many."""

    few: Peaks
    many: Peaks

    @property
    def ratio(self) -> float:
        return self.many.end / self.few.end


def measure(workload: Workload, num_stock: int, repetitions: int) -> Measurement:
    """Measure the ratio of the peaks with many clients and with a tenth of them.

    Flower's FedAvg has ``num_stock`` clients in place of the workload's number.
    """
    our_pairs: list[_Pair] = []
    stock_pairs: list[_Pair] = []
    for _ in range(repetitions):
        our_pairs.append(_pair(workload, is_stock=False))
        stock_pairs.append(
            _pair(replace(workload, num_clients=num_stock), is_stock=True)
        )
    baseline_is = f"the ratio of FedAvg.start with {num_stock} to {num_stock // 10}"
    return Measurement(
        "server_memory_ratio",
        [pair.ratio for pair in our_pairs],
        [pair.ratio for pair in stock_pairs],
        baseline_is,
        {
            **_details("ours", workload.num_clients, our_pairs),
            **_details("baseline", num_stock, stock_pairs),
        },
    )


def _pair(many: Workload, *, is_stock: bool) -> _Pair:
    few = replace(many, num_clients=many.num_clients // 10)
    return _Pair(peaks_of(few, is_stock=is_stock), peaks_of(many, is_stock=is_stock))


def _details(name: str, num_many: int, pairs: list[_Pair]) -> dict[str, object]:
    by_number = {
        num_many // 10: [pair.few for pair in pairs],
        num_many: [pair.many for pair in pairs],
    }
    return {
        f"{name}_megabytes": {
            str(number): _megabytes(peaks) for number, peaks in by_number.items()
        }
    }


def _megabytes(peaks: list[Peaks]) -> dict[str, float]:
    return {
        "peak": rounded(statistics.median(peak.end for peak in peaks)),
        "growth": rounded(statistics.median(peak.growth for peak in peaks)),
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=1)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--stock-clients", type=int, default=100)
    # Options of the fresh processes, which receive a `Workload` as JSON.
    for option in ("--ours", "--stock"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    if options.ours or options.stock:
        alone = Workload(**json.loads(options.stock or options.ours))
        peaks = stock_peaks_here(alone) if options.stock else peaks_here(alone)
        print(json.dumps(asdict(peaks)))
        return
    workload = Workload(options.clients, echoes=True, images=options.images)
    figures = measure(workload, options.stock_clients, options.repetitions)
    print(figures.as_json())


if __name__ == "__main__":
    main()
