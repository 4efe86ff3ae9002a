"""Accuracies on the clients' validation splits, between rounds."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable

from knnper.errors import printable
from knnper.server.checkpoints import Checkpoint
from knnper.server.distribution import in_groups, requests_to_personalize
from knnper.server.federation import Federation, Request, Step
from knnper.server.plausibility import validation_problem
from knnper.server.roster import Roster
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.evaluation import Validation
from knnper.strategies.core.method import UNSEEN_CLIENT

_FAILED = "round %d: client %s failed: %s"

log = logging.getLogger(__name__)


def validation_accuracies(
    assembly: Assembly,
    federation: Federation,
    roster: Roster,
    step: Step,
    trained: Checkpoint,
    skipped: Collection[str],
) -> dict[str, float]:
    """Return the accuracies on the seen clients' validation splits, pooled.

    ``skipped``: clients that are not asked. Clients that fail do not count.
    """
    server_round, titles = trained.server_round, roster.titles()
    key = assembly.key.child("broadcast", server_round)
    num_validation = roster.num_validation()
    free = {
        name: count for name, count in num_validation.items() if name not in skipped
    }
    requests: Iterable[Request]
    if assembly.experiment.run.validate_personal:
        of_all = roster.sizes()
        sizes = {name: of_all[name] for name in free}
        requests = requests_to_personalize(assembly.method, trained, key, sizes, sizes)
    else:
        unseen = key.child(UNSEEN_CLIENT)
        reference = assembly.method.broadcast(trained.state, UNSEEN_CLIENT, unseen)
        requests = (Request(group, reference) for group in in_groups(free))
    counts: Counter[str] = Counter()
    for reply in federation.exchange(step, requests):
        most = sum(num_validation[name] for name in reply.clients)
        problem = reply.failure or validation_problem(reply.record, most)
        if problem:
            names = (titles.get(name, name) for name in reply.clients)
            log.warning(_FAILED, server_round, ", ".join(names), problem)
            continue
        validation: Validation = reply.record
        for name, reason in validation.failures.items():
            title = titles.get(name, printable(name))
            log.warning(_FAILED, server_round, title, printable(reason))
        counts["right"] += validation.reference.num_correct
        counts["all"] += validation.reference.num_examples
        counts["personal right"] += validation.num_personal_correct
        counts["personal"] += validation.num_personal
    accuracies = {}
    if counts["all"]:
        accuracies["validation_accuracy"] = counts["right"] / counts["all"]
    if counts["personal"]:
        accuracies["validation_accuracy_personal"] = (
            counts["personal right"] / counts["personal"]
        )
    return accuracies
