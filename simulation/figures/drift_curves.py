"""What the clients of the drift figure show together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from simulation.figures.drift import STRATEGIES
from simulation.figures.drift_alarms import ALARMS
from simulation.figures.folder import PartRecord

GLOBAL = "global"


@dataclass(frozen=True)
class DriftCurves:
    """What all clients together show; lists have T + 1 entries, 0 ... T batches.

    Attributes
    ----------
    accuracy
        Of each strategy and of the global model, over all clients' test images.
    mean_stored
        Stored examples of a client, by strategy.
    alarmed
        Of each alarm, the part of the clients in which it has gone off.
    mean_knn_weight
        λ, over the clients.
    num_clients
        Clients in the figure.
    """

    accuracy: dict[str, list[float]]
    mean_stored: dict[str, list[float]]
    alarmed: dict[str, list[float]]
    mean_knn_weight: float
    num_clients: int


def drift_curves(
    records: Sequence[PartRecord], num_steps: int, shift_at: int
) -> DriftCurves:
    """Return what the clients' records show together.

    Parameters
    ----------
    records
        Of `simulation.figures.drift.follow_client`, one a client.
    num_steps, shift_at
        T and t_0.
    """
    steps = range(num_steps + 1)
    sides = [int(step >= shift_at) for step in steps]
    count = len(records)
    return DriftCurves(
        accuracy=dict(_accuracies(records, sides)),
        mean_stored={
            name: [total / count for total in _totals(records, "num_stored", name)]
            for name in STRATEGIES
        },
        alarmed={
            name: [_fraction_alarmed(records, name, step) for step in steps]
            for name in ALARMS
        },
        mean_knn_weight=sum(one["knn_weight"] for one in records) / count,
        num_clients=count,
    )


def _accuracies(
    records: Sequence[PartRecord], sides: Sequence[int]
) -> Iterator[tuple[str, list[float]]]:
    """Yield the accuracy of each strategy, and of the global model, at each step."""
    num_test = _columns(one["num_test"] for one in records)
    of_global = _columns(one["global_correct"] for one in records)
    curves = {name: _totals(records, "correct", name) for name in STRATEGIES}
    for name, curve in (*curves.items(), (GLOBAL, [of_global[at] for at in sides])):
        pairs = zip(curve, sides, strict=True)
        yield name, [right / max(num_test[side], 1) for right, side in pairs]


def _totals(records: Sequence[PartRecord], figure: str, strategy: str) -> list[int]:
    return _columns(one[figure][strategy] for one in records)


def _columns(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of each column."""
    return [sum(column) for column in zip(*rows, strict=True)]


def _fraction_alarmed(records: Sequence[PartRecord], alarm: str, step: int) -> float:
    """Return the part of the clients in which an alarm went off by ``step``."""
    times: list[int | None] = [one["alarmed_at"][alarm] for one in records]
    return sum(at is not None and at <= step for at in times) / len(times)
