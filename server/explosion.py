"""Detect trainings that explode: the loss, or the moves of clients, grow without bound.

Medians over clients are compared, so that no single client can end a training.
"""

import math
import statistics
from collections.abc import Iterable, Mapping

from knnper.errors import RunError

LARGEST_LOSS = 1e100  # a loss beyond it counts as infinite; in a mean it might overflow

# A round shows signs of an explosion when the median loss is this many times the lowest
# (or 1, if that is larger) above the lowest, ...
_LOSS_RISE = 20.0
# ... or when the median client moves the model by more than this times its length.
_MOVE = 2.0
# As `_LOSS_RISE`: up to this rise, a model counts as about as good as the best.
_GOOD_LOSS_RISE = 0.5


class ExplodedError(RunError):
    """A training exploded.

    Attributes
    ----------
    summary
        The rounds in which it exploded, and the sign of it.
    last_good
        The round before the first of them.
    """

    def __init__(self, server_round: int, sign: str, last_good: int) -> None:
        first = last_good + 1
        rounds = f"rounds {first} to {server_round}"
        if first == server_round:
            rounds = f"round {first}"
        self.summary = f"the training has exploded in {rounds}: {sign}"
        self.last_good = last_good
        super().__init__(
            f"{self.summary}. The last good round is {last_good}. Lower "
            "training.learning_rate in a run of its own, or, if noise protects the "
            "updates, the clip norm or the noise multiplier; or look for a client that "
            "spoils it. run.exploding_rounds is after how many such rounds a run ends, "
            "and 0 for never"
        )


def median_loss(losses: Iterable[float]) -> float | None:
    """Return the lower median of the clients' train losses; None without losses."""
    # A client that made no step reports NaN.
    known = [
        loss if abs(loss) <= LARGEST_LOSS else math.inf
        for loss in losses
        if not math.isnan(loss)
    ]
    return statistics.median_low(known) if known else None


def is_near_lowest(loss: float, lowest: float) -> bool:
    """Return whether a model with this median loss is about as good as the best one."""
    return loss <= lowest + _GOOD_LOSS_RISE * max(abs(lowest), 1.0)


def explosion_sign(
    loss: float | None, lowest: float | None, distances: Mapping[str, float]
) -> str:
    """Describe the sign that the training explodes in a round; empty without one.

    Parameters
    ----------
    loss, lowest
        Median train loss of the round, and the lowest so far.
    distances
        By field: the median client's move, in lengths of what it was sent plus 1.
    """
    if loss is not None and lowest is not None:
        most = lowest + _LOSS_RISE * max(abs(lowest), 1.0)
        if not loss <= most:
            return f"the median train loss is {loss:.3g}, and was {lowest:.3g}"
    if loss == math.inf:
        return "the median train loss is infinite"
    for name, distance in distances.items():
        if distance > _MOVE:
            return (
                f"the median client moves {name} by {distance:.3g} times the length of "
                "what it was sent"
            )
    return ""
