"""Embeddings are shared as whole batches, and kept as far as there is room."""

import pytest
import torch
from torch import Tensor

from knnper.strategies.core.task import EmbeddingPool, KeptEmbeddings


class Embedder:
    """Adds the model to the sum of each image, and counts its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, weights: Tensor, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        return images.float().sum(dim=(1, 2, 3))[:, None] + weights


def images(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)


MODEL = torch.tensor([0.5])
FIRST, SECOND, THIRD = images(1, 2), images(), images(3)


def test_each_split_is_embedded_once_and_by_itself() -> None:
    """Rows of other clients in its batches would show in its last bits."""
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL], [FIRST, SECOND, THIRD]):
        for _ in range(2):
            assert pool.embed(MODEL, SECOND, embed).shape == (0, 1)
            assert pool.embed(MODEL, FIRST, embed).tolist() == [[1.5], [2.5]]
            assert pool.embed(MODEL, THIRD, embed).tolist() == [[3.5]]
    assert embed.sizes == [0, 2, 1]


def test_equal_models_are_one() -> None:
    pool, embed, twin = EmbeddingPool(), Embedder(), MODEL.clone()
    other = torch.tensor([7.0])
    with pool.holding([MODEL, other, twin], [FIRST]):
        for weights in (MODEL, twin, other):
            assert torch.equal(
                pool.embed(weights, FIRST, embed), Embedder()(weights, FIRST)
            )
    assert embed.sizes == [2, 2]


@pytest.mark.parametrize(
    ("weights", "asked"), [(MODEL.clone(), FIRST), (MODEL, FIRST.clone())]
)
def test_what_is_not_held_is_computed_alone(weights: Tensor, asked: Tensor) -> None:
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL], [FIRST, THIRD]):
        assert pool.embed(weights, asked, embed).tolist() == [[1.5], [2.5]]
    assert embed.sizes == [2]


def test_a_model_is_recognised_by_its_memory() -> None:
    """Taking a record apart gives new objects for the same tensors."""
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL.detach()], [FIRST, THIRD]):
        pool.embed(MODEL, FIRST, embed)
        pool.embed(MODEL, FIRST, embed)
    assert embed.sizes == [2]


def test_one_group_at_a_time() -> None:
    pool = EmbeddingPool()
    with (
        pool.holding([MODEL], [FIRST]),
        pytest.raises(RuntimeError, match="one group"),
        pool.holding([MODEL], [THIRD]),
    ):
        pass


def test_nothing_is_held_afterwards() -> None:
    pool, embed = EmbeddingPool(), Embedder()
    with pytest.raises(RuntimeError), pool.holding([MODEL], [FIRST, THIRD]):
        raise RuntimeError
    pool.embed(MODEL, FIRST, embed)
    assert embed.sizes == [2]


WEIGHTS = torch.tensor([0.5, 1.5])
IMAGES = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)


class Computer:
    """Returns (n, 2) float32, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> Tensor:
        self.num_calls += 1
        return torch.full((4, 2), float(self.num_calls))


def test_content_is_computed_once_and_other_content_anew() -> None:
    kept, compute, weights = KeptEmbeddings(), Computer(), WEIGHTS.clone()
    first = kept.embed(weights, IMAGES, compute)
    assert torch.equal(kept.embed(WEIGHTS.clone(), IMAGES.clone(), compute), first)
    assert compute.num_calls == 1
    weights += 1  # in place
    others = [
        (weights, IMAGES),
        (WEIGHTS, IMAGES + 1),
        (WEIGHTS, IMAGES.view(2, 2, 1, 1)),  # the same bytes
        (WEIGHTS, IMAGES.view(torch.int8)),
    ]
    for model, images in others:
        assert not torch.equal(kept.embed(model, images, compute), first)
    assert compute.num_calls == 1 + len(others)


def test_what_has_no_room_is_computed_each_time() -> None:
    # Four rows of two numbers of four bytes.
    kept, compute = KeptEmbeddings(most_bytes=2 * 32), Computer()
    for _ in range(2):
        for offset in range(3):
            kept.embed(WEIGHTS, IMAGES + offset, compute)
    assert compute.num_calls == 3 + 1


def test_a_pool_keeps_what_it_holds_alone() -> None:
    """What is asked for in training is not asked for again."""
    kept, sizes = KeptEmbeddings(), list[int]()

    def embed(weights: Tensor, images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images.flatten(1).float() + weights[0]

    for _ in range(2):
        pool, parts = EmbeddingPool(kept), [IMAGES[:1].clone(), IMAGES[1:].clone()]
        with pool.holding([WEIGHTS], parts):
            found = pool.embed(WEIGHTS, parts[1], embed)
        assert found.tolist() == [[1.5], [2.5], [3.5]]
        pool.embed(WEIGHTS, parts[0], embed)
    assert sizes == [3, 1, 1]
