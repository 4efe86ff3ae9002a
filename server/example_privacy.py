"""ε of the clients' examples after a run with ``training.example_privacy``."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from knnper.experiment import is_timed_by_clients
from knnper.server.schedule import Schedule
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.private_examples import epsilon_of_examples
from knnper.strategies.core.training import num_steps


def example_privacy_summary(
    assembly: Assembly, sizes: Mapping[str, int], schedule: Schedule
) -> dict[str, Any]:
    """Make the entry ``training.example_privacy`` of ``results.json``.

    ε is the largest of a client, over all rounds for which it was sampled, whether it
    replied or not. All rounds count if the replies of real clients set the time: late
    clients are then in no record.

    ``sizes``: training examples by client. ``schedule``: of the finished run.
    """
    training = assembly.experiment.training
    rounds = range(1, assembly.method.num_rounds + 1)
    if is_timed_by_clients(training):
        num_rounds = Counter(dict.fromkeys(sizes, len(rounds)))
    else:
        cohorts = (schedule.cohort(server_round).versions for server_round in rounds)
        num_rounds = Counter(itertools.chain.from_iterable(cohorts))
    epsilon, delta = max(
        epsilon_of_examples(
            training, size, num_rounds[client] * num_steps(training, None, size)
        )
        for client, size in sizes.items()
    )
    return {
        "unit": "example",
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
    }
