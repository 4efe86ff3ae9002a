"""One random number from one key, without the cost of a generator."""

from knnper.config.seeding import RandomKey

NUM_BITS = 128


def draw_below(bound: int, key: RandomKey) -> int:
    """Return an integer that is uniform in [0, bound).

    No two probabilities differ by more than 2^-128.
    """
    return (key.entropy(NUM_BITS // 8) * bound) >> NUM_BITS
