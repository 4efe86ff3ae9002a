"""Milliseconds a task costs beyond its work, with a MobileNetV2 of 9 MB.

All clients take part in each round and only return the model they are sent. The
baseline is Flower's FedAvg on its own grid, with the same clients and workers.
"""

import argparse
import statistics

from benchmarks import stock
from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement
from benchmarks.rounds import round_seconds
from benchmarks.workload import Workload


def measure(
    workload: Workload, repetitions: int, num_rounds: int, baseline_repetitions: int
) -> Measurement:
    """Return milliseconds a task, by the median round of each repetition.

    Parameters
    ----------
    workload
        Clients that echo.
    repetitions
        Ray is started anew in each.
    num_rounds
        Of ours in each repetition; the baseline makes one.
    baseline_repetitions
        The first so many repetitions measure the baseline too.
    """
    bench, num_clients = workload.workbench(), workload.num_clients
    tensors = bench.task.model.named(bench.task.initial_weights)
    run = bench.experiment.run
    ours: list[float] = []
    theirs: list[float] = []
    for repetition in range(repetitions):
        say(f"task_overhead_ms: {num_clients} clients, repetition {repetition + 1}")
        seconds = round_seconds(workload, num_rounds)
        ours.append(1000 * statistics.median(seconds) / num_clients)
        if repetition < baseline_repetitions:
            seconds = stock.round_seconds(tensors, num_clients, 1, run)
            theirs.append(1000 * seconds[0] / num_clients)
    details: dict[str, object] = {
        "clients": num_clients,
        "baseline_repetitions": len(theirs),
    }
    return Measurement(
        "task_overhead_ms", ours, theirs, "ms a task of Flower's FedAvg.start", details
    )


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=2)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5, help="in each repetition")
    parser.add_argument("--carrier", default="auto", help="as in run.carrier")
    parser.add_argument(
        "--baseline-repetitions",
        type=int,
        default=None,
        metavar="N",
        help="measure the baseline in the first N repetitions only: of 1,000 clients "
        "it takes minutes each time (default: in all)",
    )
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    workload = Workload(
        given.clients, echoes=True, images=given.images, carrier=given.carrier
    )
    of_baseline = given.baseline_repetitions or given.repetitions
    print(measure(workload, given.repetitions, given.rounds, of_baseline).as_json())


if __name__ == "__main__":
    main()
