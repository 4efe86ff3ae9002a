"""Seconds of a round with three real clients that return the received model.

Server and clients are separate processes, with TLS and client keys. Ours is ``knnper
fed server``, through its gateway, and ``knnper fed client``. The baseline is stock
Flower: FedAvg.start, flower-superlink, flower-supernode, and an array per tensor.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.measurement import Measurement, Turns, make_parser, rounded, say
from benchmarks.real_federation import RealFederation, new_federation, ours, stock
from benchmarks.real_models import MOBILENET_V2, TRIVIAL

MakeRounds = Callable[[str, int], list[float]]
Start = Callable[[RealFederation], AbstractContextManager[MakeRounds]]


def measure(
    repetitions: int, num_clients: int, rounds: dict[str, tuple[int, int]]
) -> list[Measurement]:
    """Measure the median round of each repetition, for each model.

    ``rounds`` are the numbers of rounds of ours and the baseline, by model name. Each
    repetition starts both federations again, one after the other.
    """
    pairs: dict[str, list[tuple[float, float]]] = {model: [] for model in rounds}
    for repetition in range(repetitions):
        say(f"real_round_s: repetition {repetition + 1} of {repetitions}")
        ours_s = _medians(ours, num_clients, {m: n for m, (n, _) in rounds.items()})
        stock_s = _medians(stock, num_clients, {m: n for m, (_, n) in rounds.items()})
        for model in rounds:
            pairs[model].append((ours_s[model], stock_s[model]))
    turns = {
        model: Turns([value for value, _ in pairs], [other for _, other in pairs])
        for model, pairs in pairs.items()
    }
    return [_measurement(model, turns[model], num_clients, rounds) for model in rounds]


def _medians(
    start: Start, num_clients: int, rounds: dict[str, int]
) -> dict[str, float]:
    with new_federation(num_clients) as federation, start(federation) as make_rounds:
        return {
            model: statistics.median(make_rounds(model, count))
            for model, count in rounds.items()
        }


def _measurement(
    model: str, turns: Turns, num_clients: int, rounds: dict[str, tuple[int, int]]
) -> Measurement:
    details: dict[str, object] = {
        "model": model,
        "clients": num_clients,
        "rounds": rounds[model][0],
        "baseline_rounds": rounds[model][1],
        "times_as_fast": rounded(1 / statistics.median(turns.ratios())),
    }
    baseline_is = "seconds a round of Flower's FedAvg.start and flower-supernode"
    return Measurement(
        "real_round_s", turns.values, turns.baselines, baseline_is, details
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=3)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="in each repetition")
    parser.add_argument("--baseline-rounds", type=int, default=4, help="of few numbers")
    parser.add_argument("--baseline-large-rounds", type=int, default=2, help="of 9 MB")
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    rounds = {
        TRIVIAL: (options.rounds, options.baseline_rounds),
        MOBILENET_V2: (options.rounds, options.baseline_large_rounds),
    }
    for measurement in measure(options.repetitions, options.clients, rounds):
        print(measurement.as_json())


if __name__ == "__main__":
    main()
