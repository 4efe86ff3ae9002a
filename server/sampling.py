"""Who takes part in a round."""

from collections.abc import Sequence

from knnper.config.seeding import RandomKey


def num_participants(num_clients: int, participation: float) -> int:
    """Return how many of ``num_clients`` take part: the nearest integer, at least 1."""
    return max(1, int(participation * num_clients + 0.5))


def sample_participants(
    clients: Sequence[str], participation: float, server_round: int, key: RandomKey
) -> list[str]:
    """Return the clients of a round, uniformly without replacement, sorted by name.

    Parameters
    ----------
    clients
        The names to draw from, sorted.
    participation
        The fraction that takes part, in (0, 1].
    server_round
        From 1.
    key
        The experiment's root key: who takes part depends on it and the round alone.
    """
    count = num_participants(len(clients), participation)
    generator = key.child("participants", server_round).numpy()
    chosen = generator.choice(len(clients), size=count, replace=False)
    return sorted(clients[position] for position in chosen)
