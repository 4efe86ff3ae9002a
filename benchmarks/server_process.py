"""The memory of a server that makes a few rounds, alone in a fresh process.

Prints a line of JSON: the peak in megabytes before the first round, and at the end.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from flwr.serverapp import Grid

from benchmarks import stock
from benchmarks.measurement import peak_megabytes
from benchmarks.real_apps_stock import make_rounds
from benchmarks.rounds import rounds_of
from benchmarks.workload import Workload, on_flower
from knnper.server.federation import Federation
from knnper.simulation.workbench import Workbench

NUM_ROUNDS = 2


@dataclass(frozen=True)
class Peaks:
    """The most memory that a process has held so far, in megabytes.

    Attributes
    ----------
    before, end
        Before the first round and after the last.
    """

    before: float
    end: float

    @property
    def growth(self) -> float:
        """What the rounds took beyond what was there before."""
        return self.end - self.before


def peaks_of(workload: Workload, *, is_stock: bool = False) -> Peaks:
    """Make the rounds in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.server_process"]
    command += [json.dumps(asdict(workload)), *(["--stock"] if is_stock else [])]
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


def main() -> None:
    """Make the rounds and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", help="a Workload as JSON")
    parser.add_argument("--stock", action="store_true", help="with Flower's FedAvg")
    given = parser.parse_args()
    workload = Workload(**json.loads(given.workload))
    peaks = stock_peaks_here(workload) if given.stock else peaks_here(workload)
    print(json.dumps(asdict(peaks)))


if __name__ == "__main__":
    main()
