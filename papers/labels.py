"""A Dirichlet split of which clients may be tested on labels that they never had."""

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
    """Return each client's training and test examples.

    ``restricted``: test examples of a label go to clients that train on it alone, as in
    every partition that is drawn. Otherwise they follow the same draw, whoever has it.
    """
    train, test = ([list[int]() for _ in range(num_clients)] for _ in range(2))
    for label in np.unique(labels):
        shares = rng.dirichlet(np.full(num_clients, alpha))
        own, other = rng.spawn(2)
        places = own.permutation(np.flatnonzero(labels == label))
        tested = other.permutation(np.flatnonzero(test_labels == label))
        counts = own.multinomial(len(places), shares)
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
