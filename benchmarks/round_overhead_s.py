"""Seconds that a round costs beyond its work: ten clients with a trivial model.

They only return the few numbers they are sent. The baseline is Flower's FedAvg on its
own grid, with the same clients, workers and numbers.
"""

import argparse
import statistics

from benchmarks import stock
from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement
from benchmarks.rounds import round_seconds
from benchmarks.workload import Workload


def measure(
    workload: Workload, repetitions: int, num_rounds: int, baseline_rounds: int
) -> Measurement:
    """Return the median round of each repetition; Ray is started anew in each."""
    bench = workload.workbench()
    tensors = bench.task.model.named(bench.task.initial_weights)
    run = bench.experiment.run
    ours: list[float] = []
    theirs: list[float] = []
    for repetition in range(repetitions):
        say(f"round_overhead_s: repetition {repetition + 1} of {repetitions}")
        ours.append(statistics.median(round_seconds(workload, num_rounds)))
        seconds = stock.round_seconds(
            tensors, workload.num_clients, baseline_rounds, run
        )
        theirs.append(statistics.median(seconds))
    details: dict[str, object] = {
        "clients": workload.num_clients,
        "rounds": num_rounds,
        "baseline_rounds": baseline_rounds,
    }
    baseline_is = "seconds a round of Flower's FedAvg.start"
    return Measurement("round_overhead_s", ours, theirs, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20, help="in each repetition")
    parser.add_argument("--baseline-rounds", type=int, default=5)
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    workload = Workload(
        given.clients,
        model="tiny_cnn",
        embedding_dim=1,
        echoes=True,
        images=given.images,
    )
    figures = measure(workload, given.repetitions, given.rounds, given.baseline_rounds)
    print(figures.as_json())


if __name__ == "__main__":
    main()
