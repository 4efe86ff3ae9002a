"""What a client's own examples show of λ, k, σ and the class prior."""

from collections.abc import Callable

import torch
from torch import Tensor

from datastore.examples import NewExamples
from datastore.prediction.class_prior import (
    ClassPriorSettings,
    class_ratios,
    count_labels,
)
from datastore.store_reader import StoreReader
from datastore.tuning.evidence import Evidence, Queries, held_out, left_one_out

Head = Callable[[Tensor], Tensor]
"""From representations (n, p) to the global model's probabilities (n, c)."""


def validation_evidence(
    store: StoreReader,
    validation: NewExamples,
    head: Head,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of a split that is not stored.

    Parameters
    ----------
    store
        Holds the training split, from which the class prior comes too.
    validation
        The split, embedded.
    head
        Of the global model.
    num_neighbors
        The largest k that is to be scored.
    class_prior
        How it is learned.
    """
    counts = count_labels(store.contents(), store.num_classes)
    queries = _queries(validation, head, counts, class_prior)
    return held_out(store, queries, num_neighbors)


def left_out_evidence(
    store: StoreReader,
    positions: Tensor,
    head: Head,
    num_neighbors: int,
    class_prior: ClassPriorSettings,
) -> Evidence:
    """Return the evidence of stored examples, by leave-one-out.

    Each is looked up among all others, and the class prior comes from all others.

    Parameters
    ----------
    store
        A client's memory.
    positions
        Of the examples among the stored ones, by id, int64 of shape (m,).
    head, num_neighbors, class_prior
        See `validation_evidence`.
    """
    contents = store.contents()
    ids = contents.ids[positions.numpy()]
    labels = torch.from_numpy(contents.labels)[positions]
    counts = count_labels(contents, store.num_classes)
    own = torch.nn.functional.one_hot(labels, store.num_classes)
    stored = NewExamples(store.vectors(ids), labels)
    queries = _queries(stored, head, counts - own, class_prior)
    return left_one_out(store, queries, torch.from_numpy(ids), num_neighbors)


def _queries(
    examples: NewExamples,
    head: Head,
    label_counts: Tensor,
    class_prior: ClassPriorSettings,
) -> Queries:
    adapts = bool(class_prior.strengths)
    return Queries(
        examples.embeddings,
        head(examples.embeddings),
        examples.labels,
        class_ratios(label_counts, class_prior) if adapts else None,
    )
