"""A Dirichlet partition in which clients may have test labels without training data."""

import numpy as np
from numpy.typing import NDArray

Indices = list[list[int]]


def split(
    labels: NDArray[np.int64],
    test_labels: NDArray[np.int64],
    rng: np.random.Generator,
    num_clients: int = 100,
    alpha: float = 0.3,
    restricted: bool = True,
) -> tuple[Indices, Indices]:
    """Assign training and test examples to the clients.

    With ``restricted``, test examples of a label go only to clients that train on it,
    as in all partitions of the package. Otherwise they follow the Dirichlet draw alone.
    """
    train, test = ([list[int]() for _ in range(num_clients)] for _ in range(2))
    for label in np.unique(labels):
        shares = rng.dirichlet(np.full(num_clients, alpha))
        client_rng, other = rng.spawn(2)
        places = client_rng.permutation(np.flatnonzero(labels == label))
        tested = other.permutation(np.flatnonzero(test_labels == label))
        counts = client_rng.multinomial(len(places), shares)
        weights = np.where(counts > 0, shares, 0) if restricted else shares
        others = other.multinomial(len(tested), weights / weights.sum())
        for clients, examples, sizes in (
            (train, places, counts),
            (test, tested, others),
        ):
            parts = np.split(examples, np.cumsum(sizes)[:-1])
            for client, part in zip(clients, parts, strict=True):
                client.extend(part.tolist())
    return train, test
