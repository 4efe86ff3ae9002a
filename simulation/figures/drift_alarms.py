"""When clients notice that their distribution has changed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from datastore.drift.alarm import DriftAlarm
from datastore.drift.scores import Scores, label_scores, neighbor_scores
from datastore.memory import memory_store
from datastore.store import Store
from knnper.config.ranges import PositiveFloat, PositiveInt
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from simulation.figures.embedded import Embedded


def _distance(memory: Store, examples: Embedded, num_neighbors: int) -> Scores:
    return neighbor_scores(memory, examples.embeddings, num_neighbors)


def _distance_to_label(memory: Store, examples: Embedded, num_neighbors: int) -> Scores:
    return label_scores(memory, examples.embeddings, examples.labels, num_neighbors)


ALARMS: Mapping[str, Callable[[Store, Embedded, int], Scores]] = MappingProxyType(
    {"distance": _distance, "distance_to_own_label": _distance_to_label}
)
"""What is watched, by name."""


@dataclass(frozen=True)
class AlarmSettings(Settings):
    """How readily an alarm goes off.

    Attributes
    ----------
    run_length
        h, the examples that may pass between false alarms.
    num_neighbors
        k of the mean distance that is watched.
    """

    run_length: PositiveFloat = 10_000.0
    num_neighbors: PositiveInt = 5


def alarm_steps(
    fitted: Embedded,
    held_out: Embedded,
    batches: Sequence[Embedded],
    settings: AlarmSettings,
    key: RandomKey,
) -> Mapping[str, int | None]:
    """Return after how many batches each of `ALARMS` went off; None if it did not.

    Parameters
    ----------
    fitted
        What distances are measured to, all the time.
    held_out
        The reference: from before the shift, and not among ``fitted``.
    batches
        What arrives.
    settings
        Of the alarms.
    key
        Of their tie-breaks.
    """
    if len(held_out) == 0:
        return dict.fromkeys(ALARMS)
    memory = memory_store(
        fitted.embeddings, fitted.labels, fitted.probabilities.shape[1]
    )
    count = settings.num_neighbors
    return {
        kind: _alarm_step(
            DriftAlarm(settings.run_length, key.child(kind)),
            score(memory, held_out, count),
            (score(memory, batch, count) for batch in batches),
        )
        for kind, score in ALARMS.items()
    }


def _alarm_step(
    alarm: DriftAlarm, reference: Scores, batches: Iterable[Scores]
) -> int | None:
    state = alarm.start(reference)
    for step, scores in enumerate(batches, start=1):
        state = alarm.update(state, scores)
        if state.alarmed_at is not None:
            return step
    return None
