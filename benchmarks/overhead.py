"""What a round costs beyond its work: in seconds, and in milliseconds a task.

All clients take part in each round and only return the model they are sent. In
`round_overhead_s` ten clients have a few numbers; in `task_overhead_ms` many have a
MobileNetV2 of 9 MB. The baseline is Flower's FedAvg on its own grid, with the same
clients, workers and numbers. Ray is started anew for each repetition.
"""

import argparse
import statistics

from benchmarks import stock
from benchmarks.measurement import Measurement, make_parser, say
from benchmarks.rounds import round_seconds
from benchmarks.workload import Workload

FEW_CLIENTS, MORE_ROUNDS, STOCK_ROUNDS = 10, 20, 5


def median_rounds(
    name: str,
    workload: Workload,
    num_rounds: tuple[int, int],
    repetitions: int,
    baseline_repetitions: int,
) -> tuple[list[float], list[float]]:
    """Return the seconds of the median round of each repetition, ours and Flower's.

    ``num_rounds`` are those of both; only the first repetitions have the baseline.
    """
    bench, num_clients = workload.workbench(), workload.num_clients
    tensors = bench.task.model.named(bench.task.initial_weights)
    run = bench.experiment.run
    ours: list[float] = []
    theirs: list[float] = []
    for repetition in range(repetitions):
        say(f"{name}: {num_clients} clients, repetition {repetition + 1}")
        ours.append(statistics.median(round_seconds(workload, num_rounds[0])))
        if repetition < baseline_repetitions:
            seconds = stock.round_seconds(tensors, num_clients, num_rounds[1], run)
            theirs.append(statistics.median(seconds))
    return ours, theirs


def of_a_round(images: str, repetitions: int) -> Measurement:
    """Return the seconds of a round of few clients with few numbers."""
    workload = Workload(
        FEW_CLIENTS, model="tiny_cnn", embedding_dim=1, echoes=True, images=images
    )
    name, num_rounds = "round_overhead_s", (MORE_ROUNDS, STOCK_ROUNDS)
    times = median_rounds(name, workload, num_rounds, repetitions, repetitions)
    details: dict[str, object] = {"clients": FEW_CLIENTS}
    return Measurement(
        name, *times, "seconds a round of Flower's FedAvg.start", details
    )


def of_a_task(
    workload: Workload, num_rounds: int, repetitions: int, baseline_repetitions: int
) -> Measurement:
    """Return milliseconds a task; the baseline makes one round."""
    name, num_clients = "task_overhead_ms", workload.num_clients
    times = median_rounds(
        name, workload, (num_rounds, 1), repetitions, baseline_repetitions
    )
    ours, theirs = ([1000 * one / num_clients for one in found] for found in times)
    details: dict[str, object] = {
        "clients": num_clients,
        "baseline_repetitions": len(theirs),
    }
    baseline_is = "ms a task of Flower's FedAvg.start"
    return Measurement(name, ours, theirs, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--clients", type=int, default=200, help="with 9 MB")
    parser.add_argument("--rounds", type=int, default=5, help="of these")
    parser.add_argument("--carrier", default="auto", help="as in run.carrier")
    parser.add_argument(
        "--baseline-repetitions",
        type=int,
        default=None,
        metavar="N",
        help="measure their baseline in the first N repetitions only: of 1,000 clients "
        "it takes minutes each time (default: in all)",
    )
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    print(of_a_round(given.images, given.repetitions).as_json(), flush=True)
    workload = Workload(
        given.clients, echoes=True, images=given.images, carrier=given.carrier
    )
    of_baseline = given.baseline_repetitions or given.repetitions
    found = of_a_task(workload, given.rounds, given.repetitions, of_baseline)
    print(found.as_json())


if __name__ == "__main__":
    main()
