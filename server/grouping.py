"""Which clients are served together, in one task."""

from collections.abc import Iterator, Mapping

IMAGES_AT_ONCE = 1024
"""Images of the clients of one group: a few large batches. It takes a fraction of a
second, so that many workers have something to do until the end."""


def in_groups(
    sizes: Mapping[str, int], at_most: int = IMAGES_AT_ONCE
) -> Iterator[tuple[str, ...]]:
    """Yield groups of clients, in the order of ``sizes``.

    Parameters
    ----------
    sizes
        The number of images of each client, by name.
    at_most
        Images in one group, unless a single client has more.
    """
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > at_most:
            yield tuple(group)
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield tuple(group)
