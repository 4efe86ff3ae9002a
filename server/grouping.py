"""Which clients are served together, in one task."""

import itertools
import math
from collections.abc import Iterator, Mapping

IMAGES_AT_ONCE = 1024
"""Images of the clients of one group. A task of so many takes a fraction of a second,
so that many workers have something to do until the end; its overhead is small."""


def in_groups(
    sizes: Mapping[str, int], at_once: int = IMAGES_AT_ONCE
) -> Iterator[tuple[str, ...]]:
    """Yield groups of clients, in the order of ``sizes``, of about the same size.

    Parameters
    ----------
    sizes
        The number of images of each client, by name.
    at_once
        Images in one group, as nearly as clients that are not divided allow.
    """
    num_groups = max(1, math.ceil(sum(sizes.values()) / at_once))
    share = max(1, sum(sizes.values())) / num_groups
    ends = itertools.accumulate(sizes.values())
    # A client belongs to the group in whose share its middle lies.
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    numbered = zip(sizes, (int(middle / share) for middle in middles), strict=True)
    for _, group in itertools.groupby(numbered, key=lambda member: member[1]):
        yield tuple(name for name, _ in group)
