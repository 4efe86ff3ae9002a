"""The record of a round, a line of ``rounds.jsonl``."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knnper.experiment import TrainingSettings
from knnper.server.checkpoints import History
from knnper.server.fleet import Cohort
from knnper.server.tally import Tally

# Failed clients with a reason in a round's record.
MOST_NAMED = 100


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of a round.

    Attributes
    ----------
    state, history
        After the round.
    clipped
        See `knnper.server.screening.Screening.clipped`.
    explosion
        The sign that the training explodes, or empty.
    """

    state: Any
    history: History
    tally: Tally
    clipped: Mapping[str, float]
    explosion: str


def round_record(
    server_round: int, cohort: Cohort, outcome: RoundOutcome, training: TrainingSettings
) -> dict[str, Any]:
    """Make the record of a round, without validation, privacy and seconds."""
    tally, titles = outcome.tally, outcome.tally.titles
    record: dict[str, Any] = {
        "server_round": server_round,
        "num_clients": len(tally.used),
        "num_failed": len(tally.failures),
        "train_loss": tally.train_loss,
        "bytes_down": tally.bytes_down,
        "bytes_up": tally.bytes_up,
        "learning_rate": training.learning_rate_at(server_round),
        **_time_figures(cohort, server_round),
    }
    if cohort.replies is not None:
        record["participants"] = {
            titles.get(client, client): server_round - 1 - cohort.versions[client]
            for client in sorted(tally.used)
        }
    if outcome.clipped:
        clipped = itertools.islice(outcome.clipped.items(), MOST_NAMED)
        record["clipped"] = {
            titles.get(client, client): times for client, times in clipped
        }
    if left_out := sorted(outcome.history.left_out):
        record["left_out"] = [titles.get(client, client) for client in left_out]
    if tally.failures:
        failures = itertools.islice(tally.failures.items(), MOST_NAMED)
        record["failures"] = dict(failures)
    return record


def _time_figures(cohort: Cohort, server_round: int) -> dict[str, float]:
    """Return the figures of a round about time and staleness; none without a clock."""
    if cohort.ended_s is None and cohort.replies is None:
        return {}
    staleness = [server_round - 1 - version for version in cohort.versions.values()]
    virtual = {} if cohort.ended_s is None else {"virtual_seconds": cohort.ended_s}
    return {
        **virtual,
        "num_late": cohort.num_late,
        "staleness": statistics.fmean(staleness),
        "staleness_max": max(staleness),
    }
