"""Training samples per second, as a fraction of a bare torch loop.

All clients train for one epoch in each round, in the round loop over Flower on Ray. The
bare loop makes steps on batches of the same sizes in the same number of processes with
one thread each. Rounds and passes of the bare loop take turns.
"""

import argparse
import math
import statistics

import torch

from benchmarks.bare_training import TrainingShare, train_share, training_shares
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
from benchmarks.rounds import rounds_of
from benchmarks.workload import Workload, on_flower
from knnper.server.federation import Federation
from knnper.simulation.workbench import Workbench


def measure(
    workload: Workload, repetitions: int, keeps_memory: bool = False
) -> Measurement:
    """Measure the ratio of samples per second, ours to bare.

    Bare processes may keep freed memory, like our workers.
    """
    shares = training_shares(workload, keeps_memory)
    with Processes(workload.num_workers) as processes:

        def lead(bench: Workbench, federation: Federation) -> Turns:
            with rounds_of(bench, federation) as rounds:
                return in_turn(
                    rounds.measure_round,
                    lambda: seconds_of(lambda: _bare_pass(processes, shares)),
                    repetitions,
                )

        turns = on_flower(workload, lead)
    return _figures(workload, shares, turns)


def _bare_pass(processes: Processes, shares: list[TrainingShare]) -> None:
    losses = processes.run(train_share, shares)
    say(f"training_vs_bare_torch: a bare pass ended with loss {max(losses):.2f}")
    if not all(map(math.isfinite, losses)):
        raise RuntimeError("the bare loop diverged: there is nothing to compare")


def _figures(
    workload: Workload, shares: list[TrainingShare], turns: Turns
) -> Measurement:
    num_samples = sum(len(batch) for share in shares for batch in share.batches)
    our_rates = [num_samples / seconds for seconds in turns.values]
    bare = [num_samples / seconds for seconds in turns.baselines]
    details: dict[str, object] = {
        "samples_per_s": rounded(statistics.median(our_rates)),
        "clients": workload.num_clients,
        "images_per_client": workload.num_train,
        "batch_size": workload.batch_size,
        "model": workload.model,
        "device": _device(workload),
        "samples_per_round": num_samples,
    }
    ratios = [1 / ratio for ratio in turns.ratios()]
    baseline_is = "samples/s of the bare torch loop"
    return Measurement("training_vs_bare_torch", ratios, bare, baseline_is, details)


def _device(workload: Workload) -> str:
    return torch.cuda.get_device_name() if workload.gpus_per_client else "cpu"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--images-per-client", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument(
        "--gpus-per-client",
        type=float,
        default=0.0,
        help="of each worker, ours and bare ones; 0.1 is ten of them on one GPU",
    )
    parser.add_argument(
        "--bare-keeps-memory",
        action="store_true",
        help="let the bare processes keep freed memory, as ours do",
    )
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    workload = Workload(
        options.clients,
        num_train=options.images_per_client,
        batch_size=options.batch_size,
        num_workers=options.workers,
        images=options.images,
        model=options.model,
        gpus_per_client=options.gpus_per_client,
    )
    print(measure(workload, options.repetitions, options.bare_keeps_memory).as_json())


if __name__ == "__main__":
    main()
