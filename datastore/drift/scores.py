"""How little an example conforms to a memory: its distance to the nearest stored.

Papernot, McDaniel, "Deep k-Nearest Neighbors", 2018, use the neighbours of a learned
representation as a measure of nonconformity; here it is their mean distance.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datastore.contents import Contents, Ids
from datastore.neighbors import Neighbors

Scores = NDArray[np.float64]


class Memory(Protocol):
    """What a score needs of a store."""

    def __len__(self) -> int:
        """Return n."""

    def contents(self) -> Contents:
        """Return the ids and labels of all that is stored."""

    def vectors(self, ids: Ids) -> Tensor:
        """Return the representations of ``ids`` (m,), float32 of shape (m, p)."""

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest of each of ``queries`` (m, p)."""


def neighbor_scores(memory: Memory, embeddings: Tensor, num_neighbors: int) -> Scores:
    """Return the mean distance of each example to its nearest stored ones.

    Parameters
    ----------
    memory
        It must be the same for the reference and for all that arrives: of two memories
        the fuller one has the smaller distances. Where the store goes on changing,
        score against a copy of what it held when the reference was made.
    embeddings
        float32, shape (m, p).
    num_neighbors
        k; fewer where fewer are stored.

    Returns
    -------
    Scores
        float64, shape (m,).

    Raises
    ------
    ValueError
        If the memory is empty.
    """
    _require_stored(memory, 1)
    neighbors = memory.search(embeddings, num_neighbors)
    return _scores(neighbors.squared_distances.sqrt().mean(dim=1))


def label_scores(
    memory: Memory, embeddings: Tensor, labels: Tensor, num_neighbors: int
) -> Scores:
    """Return the mean distance of each example to the nearest of its own label.

    The one to take where labels arrive, too: it grows with labels that the memory has
    few of, even where the model's representations of labels overlap, and where the same
    inputs come with other labels, to which `neighbor_scores` is blind. All stored
    examples of the labels are compared.

    Parameters
    ----------
    memory, embeddings, num_neighbors
        As of `neighbor_scores`.
    labels
        int64, shape (m,).

    Returns
    -------
    Scores
        float64, shape (m,); infinite where none of the label is stored.
    """
    contents = memory.contents()
    scores = torch.full((len(labels),), torch.inf, dtype=torch.float64)
    for label in np.unique(labels.numpy()).tolist():
        stored = memory.vectors(contents.ids[contents.labels == label])
        if len(stored) == 0:
            continue
        arriving = labels == label
        distances = torch.cdist(embeddings[arriving].double(), stored.double())
        nearest = distances.topk(min(num_neighbors, len(stored)), largest=False)
        scores[arriving] = nearest.values.mean(dim=1)
    return _scores(scores)


def leave_one_out_scores(memory: Memory, num_neighbors: int) -> Scores:
    """Return the scores of the stored examples, each without itself.

    A reference for clients that can hold nothing out. Held-out examples are the better
    reference: given the store, they and what arrives are exchangeable, which is what
    the guarantee of `datastore.drift.alarm.DriftAlarm` rests on. The stored ones are
    not quite: each is compared with n - 1 others instead of n, which makes their
    distances slightly larger; and where the model was trained on them, it has drawn
    them closer to each other than it draws anything new, which makes their distances
    smaller and can raise false alarms.

    Returns
    -------
    Scores
        float64, shape (n,).

    Raises
    ------
    ValueError
        If fewer than two examples are stored.
    """
    _require_stored(memory, 2)
    ids = memory.contents().ids
    neighbors = memory.search(memory.vectors(ids), num_neighbors + 1)
    itself = neighbors.ids == torch.from_numpy(ids)[:, None]
    # An approximate search may miss it, and then the last found is one too many.
    itself[:, -1] |= ~itself.any(dim=1)
    distances = neighbors.squared_distances.sqrt().masked_fill(itself, 0.0)
    return _scores(distances.sum(dim=1) / (distances.shape[1] - 1))


def _require_stored(memory: Memory, least: int) -> None:
    if len(memory) < least:
        raise ValueError(
            f"expected a memory of at least {least} stored examples to measure "
            f"distances to, found {len(memory)}; add examples first"
        )


def _scores(values: Tensor) -> Scores:
    scores: Scores = values.numpy()
    return scores
