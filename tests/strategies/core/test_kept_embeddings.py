"""Embeddings are kept by content, as far as there is room."""

import torch
from torch import Tensor

from strategies.core.embedding_pool import EmbeddingPool
from strategies.core.kept_embeddings import KeptEmbeddings

WEIGHTS = torch.tensor([0.5, 1.5])
IMAGES = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)


class Computer:
    """Returns (n, 2) float32, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> Tensor:
        self.num_calls += 1
        return torch.full((4, 2), float(self.num_calls))


def test_equal_content_is_computed_once() -> None:
    kept, compute = KeptEmbeddings(), Computer()
    first = kept.embed(WEIGHTS, IMAGES, compute)
    again = kept.embed(WEIGHTS.clone(), IMAGES.clone(), compute)
    assert compute.num_calls == 1
    assert torch.equal(first, again)


def test_other_content_is_computed() -> None:
    kept, compute = KeptEmbeddings(), Computer()
    others = [
        (WEIGHTS, IMAGES),
        (WEIGHTS + 1, IMAGES),
        (WEIGHTS, IMAGES + 1),
        (WEIGHTS, IMAGES.view(2, 2, 1, 1)),  # the same bytes
        (WEIGHTS, IMAGES.view(torch.int8)),
    ]
    for weights, images in others:
        kept.embed(weights, images, compute)
    assert compute.num_calls == len(others)


def test_weights_that_change_in_place_are_others() -> None:
    kept, compute, weights = KeptEmbeddings(), Computer(), WEIGHTS.clone()
    first = kept.embed(weights, IMAGES, compute)
    weights += 1
    second = kept.embed(weights, IMAGES, compute)
    assert compute.num_calls == 2
    assert not torch.equal(first, second)


def test_what_has_no_room_is_computed_each_time() -> None:
    # Four rows of two numbers of four bytes.
    kept, compute = KeptEmbeddings(most_bytes=2 * 32), Computer()
    for _ in range(2):
        for offset in range(3):
            kept.embed(WEIGHTS, IMAGES + offset, compute)
    assert compute.num_calls == 3 + 1


def test_a_pool_keeps_what_is_embedded_together_alone() -> None:
    """What is asked for in training is not asked for again."""
    kept, sizes = KeptEmbeddings(), list[int]()

    def embed(weights: Tensor, images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images.flatten(1).float() + weights[0]

    for _ in range(2):
        pool, parts = EmbeddingPool(kept), [IMAGES[:1].clone(), IMAGES[1:].clone()]
        with pool.holding([WEIGHTS], [parts]):
            found = pool.embed(WEIGHTS, parts[1], embed)
        assert found.tolist() == [[1.5], [2.5], [3.5]]
        pool.embed(WEIGHTS, parts[0], embed)
    assert sizes == [4, 1, 1]
