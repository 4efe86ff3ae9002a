"""When a training has exploded: it goes on for ever and gets nowhere.

Told by medians over the clients of a round, which one client cannot move.
"""

import math
import statistics
from collections.abc import Iterable

from knnper.config.errors import RunError
from server.comparison import Comparison

LARGEST_LOSS = 1e100
"""A loss beyond it counts as infinite; in a mean it might overflow."""

_TIMES_THE_LOWEST = 20.0
_TIMES_ITS_LENGTH = 2.0


class ExplodedError(RunError):
    """A training exploded."""


def exploded(server_round: int, sign: str, last_good: int) -> ExplodedError:
    """Return the error that ends a training.

    Parameters
    ----------
    server_round
        The round that ends it.
    sign
        What tells; see `sign_of_explosion`.
    last_good
        The last round before it exploded.
    """
    since = last_good + 1
    several = f"rounds {since} to {server_round}"
    when = several if since < server_round else f"round {since}"
    return ExplodedError(
        f"the training has exploded in {when}: {sign}. The last good round is "
        f"{last_good}. Lower training.learning_rate in a run of its own, or look for a "
        "client that spoils it; run.exploding_rounds is after how many such rounds a "
        "run ends, and 0 for never"
    )


def median_loss(losses: Iterable[float]) -> float | None:
    """Return the lower median of the clients' train losses; infinite if they are.

    None if nobody made a step, of which a loss that is NaN tells.
    """
    known = [
        loss if abs(loss) <= LARGEST_LOSS else math.inf
        for loss in losses
        if not math.isnan(loss)
    ]
    return statistics.median_low(known) if known else None


def sign_of_explosion(
    loss: float | None, lowest: float | None, comparison: Comparison
) -> str:
    """Return what in a round tells that the training explodes; empty if nothing does.

    Parameters
    ----------
    loss
        The round's `median_loss`.
    lowest
        That of the earlier rounds.
    comparison
        Of the round's updates.
    """
    if loss is not None and lowest is not None:
        most = lowest + _TIMES_THE_LOWEST * max(abs(lowest), 1.0)
        if not loss <= most:
            return f"the median train loss is {loss:.3g}, and was {lowest:.3g}"
    if loss == math.inf:
        return "the median train loss is infinite"
    for name, far in comparison.distances().items():
        if far > _TIMES_ITS_LENGTH:
            return (
                f"the median client moves {name} by {far:.3g} times the length of what "
                "it was sent"
            )
    return ""
