"""Seconds of model distribution with kNN-Per, as a multiple of bare torch and FAISS.

Every client embeds its images with an untrained MobileNetV2, chooses λ and is tested,
in the server's model distribution over Flower on Ray. The baseline does the same for
the same clients in the same number of processes with one thread each. Both take turns.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.bare_personalization import (
    BareResult,
    PersonalizationShare,
    personalization_shares,
    personalize_share,
)
from benchmarks.measurement import (
    Measurement,
    Turns,
    in_turn,
    make_parser,
    rounded,
    say,
    seconds_of,
)
from benchmarks.processes import Processes
from benchmarks.workload import Workload, on_flower
from knnper.server.distribution import ModelDistribution
from knnper.server.federation import Federation
from knnper.server.rounds import untrained
from knnper.simulation.workbench import Workbench
from knnper.strategies.core.evaluation import ClientResult, Evaluation


def measure(workload: Workload, repetitions: int) -> Measurement:
    """Measure the ratio of seconds, ours to bare."""
    results: list[ClientResult] = []
    bare_results: list[BareResult] = []
    with Processes(workload.num_workers) as processes:

        def bare_pass(shares: list[PersonalizationShare]) -> None:
            bare_results.clear()
            for part in processes.run(personalize_share, shares):
                bare_results.extend(part)

        def lead(bench: Workbench, federation: Federation) -> Turns:
            roster = bench.roster
            start = untrained(bench, roster)
            distribution = ModelDistribution(bench.method, federation, bench.key)

            def distribute_all() -> None:
                say("personalize_vs_bare: all clients personalise")
                handed = distribution.personalize(start, roster.sizes(), roster.seen())
                results[:] = [
                    result
                    for replies in handed
                    for result in replies.values()
                    if result
                ]

            with tempfile.TemporaryDirectory() as folder:
                weights_file = str(Path(folder) / "weights.safetensors")
                save_file(bench.task.model.named(start.state.weights), weights_file)
                shares = personalization_shares(workload, weights_file)
                return in_turn(
                    lambda: seconds_of(distribute_all),
                    lambda: seconds_of(lambda: bare_pass(shares)),
                    repetitions,
                )

        turns = on_flower(workload, lead)
    details: dict[str, object] = {
        "seconds": rounded(statistics.median(turns.values)),
        "clients": workload.num_clients,
        **_agreement(results, bare_results),
    }
    baseline_is = "seconds of bare torch and FAISS"
    return Measurement(
        "personalize_vs_bare", turns.ratios(), turns.baselines, baseline_is, details
    )


def _agreement(
    results: list[ClientResult], bare_results: list[BareResult]
) -> dict[str, object]:
    """Return the mean accuracies, and the number of clients with equal figures."""
    bare = {result.client: result for result in bare_results}
    our_results = [
        BareResult(
            client=result.client,
            knn_weight=result.chosen["knn_weight"],
            personal=_accuracy(result.personal),
            reference=_accuracy(result.reference),
            validation=_accuracy(result.validation),
        )
        for result in results
    ]
    return {
        "accuracy": rounded(
            statistics.fmean(result.personal for result in our_results)
        ),
        "baseline_accuracy": rounded(
            statistics.fmean(result.personal for result in bare_results)
        ),
        "clients_that_agree": sum(
            _agree(result, bare[result.client]) for result in our_results
        ),
    }


def _accuracy(evaluation: Evaluation) -> float:
    return evaluation.num_correct / evaluation.num_examples


def _agree(first: BareResult, other: BareResult) -> bool:
    return all(
        math.isclose(getattr(first, name), getattr(other, name), abs_tol=1e-6)
        for name in ("knn_weight", "personal", "reference", "validation")
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    workload = Workload(
        options.clients,
        num_train=80,
        num_validation=20,
        num_test=20,
        method="knn_per",
        num_workers=options.workers,
        images=options.images,
    )
    print(measure(workload, options.repetitions).as_json())


if __name__ == "__main__":
    main()
