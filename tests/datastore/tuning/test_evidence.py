"""Examples outside the store, and stored ones left out one at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.store import memory_store
from knnper.datastore.tuning import Queries, held_out, left_one_out
from knnper.seeding import RandomKey

NUM_CLASSES = 3


def queries_of(embeddings: Tensor, labels: Tensor) -> Queries:
    uniform = torch.full((len(labels), NUM_CLASSES), 1 / NUM_CLASSES)
    return Queries(embeddings, uniform, labels)


def drawn(seed: int, count: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Return representations on a small lattice, many of them equal, and labels."""
    generator = RandomKey(seed).numpy()
    embeddings = torch.from_numpy(generator.integers(0, num_values, (count, 2)))
    labels = torch.from_numpy(generator.integers(0, NUM_CLASSES, count))
    return embeddings.float(), labels


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 25),
    num_values=st.integers(1, 4),
    num_neighbors=st.integers(1, 30),
)
def test_leaving_one_out_equals_as_many_stores_without_it(
    seed: int, count: int, num_values: int, num_neighbors: int
) -> None:
    embeddings, labels = drawn(seed, count, num_values)
    store = memory_store(embeddings, labels, NUM_CLASSES)

    evidence = left_one_out(
        store,
        queries_of(embeddings, labels),
        torch.from_numpy(store.contents().ids),
        num_neighbors,
    )
    assert evidence.neighbor_labels.shape == (count, min(num_neighbors, count - 1))
    for row in range(count):
        others = torch.arange(count) != row
        without = memory_store(embeddings[others], labels[others], NUM_CLASSES)
        found = without.search(embeddings[row : row + 1], num_neighbors)
        assert torch.equal(evidence.squared_distances[row], found.squared_distances[0])
        assert torch.equal(evidence.neighbor_labels[row], found.labels[0])


def test_some_of_the_stored_examples_may_be_left_out() -> None:
    embeddings, labels = drawn(3, 20, 3)
    store = memory_store(embeddings, labels, NUM_CLASSES)
    ids = torch.tensor([17, 4])

    every = left_one_out(store, queries_of(embeddings, labels), torch.arange(1, 21), 5)
    some = left_one_out(store, queries_of(embeddings[ids], labels[ids]), ids + 1, 5)
    assert torch.equal(some.squared_distances, every.squared_distances[ids])
    assert torch.equal(some.neighbor_labels, every.neighbor_labels[ids])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_stored_examples_are_no_evidence(count: int) -> None:
    embeddings, labels = drawn(1, count, 3)
    store = memory_store(embeddings, labels, NUM_CLASSES)
    queries = queries_of(embeddings, labels)

    assert (
        len(left_one_out(store, queries, torch.from_numpy(store.contents().ids), 5))
        == 0
    )


def test_examples_outside_the_store_are_searched_as_they_are() -> None:
    embeddings, labels = drawn(2, 20, 3)
    store = memory_store(embeddings[:15], labels[:15], NUM_CLASSES)

    evidence = held_out(store, queries_of(embeddings[15:], labels[15:]), 4)
    found = store.search(embeddings[15:], 4)
    assert len(evidence) == 5
    assert torch.equal(evidence.squared_distances, found.squared_distances)
    assert torch.equal(evidence.neighbor_labels, found.labels)


def test_an_empty_store_is_no_evidence() -> None:
    embeddings, labels = drawn(2, 5, 3)
    store = memory_store(embeddings[:0], labels[:0], NUM_CLASSES)
    assert len(held_out(store, queries_of(embeddings, labels), 4)) == 0


def test_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="pass logits through a softmax first"):
        Queries(torch.zeros((1, 2)), torch.tensor([[3.0, -1.0]]), torch.tensor([0]))
