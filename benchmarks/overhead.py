"""Overhead of a round in seconds, and of a task in milliseconds.

All clients take part in each round and return the received model. In
`round_overhead_s` ten clients have a few numbers; in `task_overhead_ms` many have a
MobileNetV2 of 9 MB. The baseline is Flower's FedAvg on its own grid, with the same
clients, workers and numbers. Each repetition starts a new Ray.
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
    """Measure the median round of each repetition, ours and Flower's.

    ``num_rounds`` are for both; only the first repetitions measure the baseline.
    """
    bench = workload.workbench()
    num_clients = workload.num_clients
    tensors = bench.task.model.named(bench.task.initial_weights)
    run = bench.experiment.run
    our_medians: list[float] = []
    stock_medians: list[float] = []
    for repetition in range(repetitions):
        say(f"{name}: {num_clients} clients, repetition {repetition + 1}")
        our_medians.append(statistics.median(round_seconds(workload, num_rounds[0])))
        if repetition < baseline_repetitions:
            seconds = stock.round_seconds(tensors, num_clients, num_rounds[1], run)
            stock_medians.append(statistics.median(seconds))
    return our_medians, stock_medians


def of_a_round(images: str, repetitions: int) -> Measurement:
    """Measure the seconds of a round of few clients with few numbers."""
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
    """Measure the milliseconds per task; the baseline makes one round."""
    name, num_clients = "task_overhead_ms", workload.num_clients
    times = median_rounds(
        name, workload, (num_rounds, 1), repetitions, baseline_repetitions
    )
    our_milliseconds, stock_milliseconds = (
        [1000 * seconds / num_clients for seconds in medians] for medians in times
    )
    details: dict[str, object] = {
        "clients": num_clients,
        "baseline_repetitions": len(stock_milliseconds),
    }
    baseline_is = "ms a task of Flower's FedAvg.start"
    return Measurement(name, our_milliseconds, stock_milliseconds, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
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
    options = parser().parse_args()
    print(of_a_round(options.images, options.repetitions).as_json(), flush=True)
    workload = Workload(
        options.clients, echoes=True, images=options.images, carrier=options.carrier
    )
    of_baseline = options.baseline_repetitions or options.repetitions
    measurement = of_a_task(workload, options.rounds, options.repetitions, of_baseline)
    print(measurement.as_json())


if __name__ == "__main__":
    main()
