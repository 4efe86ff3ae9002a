"""Numbers of examples that clients claim: their weights, and limits on updates."""

import math
import statistics
from collections.abc import Collection, Mapping

# Up to this many times the median weight, a claimed weight does not lower the limits.
_FULL_LENGTH_UP_TO = 1.5


def cap_claims(
    counts: Mapping[str, int],
    claimed: Collection[str],
    most: float,
    most_times: float | None = None,
) -> dict[str, int]:
    """Cut numbers of examples that clients claim and that are too large.

    Parameters
    ----------
    counts
        Training examples of each client of a round.
    claimed
        Clients that claim their number themselves.
    most
        The largest part of the total that a claim may be.
    most_times
        How many times the median of all counts a claim may be; None for any.
    """
    if most_times is not None and counts:
        limit = max(1, int(most_times * statistics.median_low(counts.values())))
        counts = {
            name: min(count, limit) if name in claimed else count
            for name, count in counts.items()
        }
    claims = sorted((counts[name] for name in counts if name in claimed), reverse=True)
    others = sum(counts.values())
    limit = claims[-1] if claims else 0
    # Cut the largest claims to one limit, one claim more at a time, until the next is
    # below the limit that follows: it is `most` of the total with `num_cut` at the
    # limit.
    for num_cut, claim in enumerate([*claims, 0]):
        if others == 0 or num_cut * most >= 1:
            break
        share = most * others / (1 - num_cut * most)
        if claim <= share:
            limit = max(1, int(share))
            break
        others -= claim
    return {
        name: min(count, limit) if name in claimed else count
        for name, count in counts.items()
    }


def leeway(
    counts: Mapping[str, int], weights: Mapping[str, int], claimed: Collection[str]
) -> dict[str, float]:
    """Return the factor on how far each client may move, against the median client.

    A client with more data makes more steps, each in a direction of its own: the factor
    is √n where the number of examples is verified. Where it is a claim, a large weight
    lowers the limit, since weight and length multiply in a mean.

    Parameters
    ----------
    counts, weights
        Training examples of each client, before and after `cap_claims`.
    """
    if not counts:  # a private round may have no clients
        return {}
    usual = statistics.median_low(counts.values())
    return {
        name: min(1.0, _FULL_LENGTH_UP_TO * usual / weights[name])
        if name in claimed
        else math.sqrt(max(1.0, count / usual))
        for name, count in counts.items()
    }
