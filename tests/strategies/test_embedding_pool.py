"""Embeddings computed together are those that would be computed apart."""

import pytest
import torch
from torch import Tensor

from strategies.core.embedding_pool import EmbeddingPool


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


def test_a_part_is_embedded_once_whoever_asks_first() -> None:
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL], [[FIRST, SECOND], [THIRD]]):
        assert pool.embed(MODEL, SECOND, embed).shape == (0, 1)
        assert pool.embed(MODEL, FIRST, embed).tolist() == [[1.5], [2.5]]
        assert embed.sizes == [2]
        assert pool.embed(MODEL, THIRD, embed).tolist() == [[3.5]]
        assert pool.embed(MODEL, THIRD, embed).tolist() == [[3.5]]
    assert embed.sizes == [2, 1]


def test_equal_models_are_one() -> None:
    pool, embed, twin = EmbeddingPool(), Embedder(), MODEL.clone()
    other = torch.tensor([7.0])
    with pool.holding([MODEL, other, twin], [[FIRST]]):
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
    with pool.holding([MODEL], [[FIRST, THIRD]]):
        assert pool.embed(weights, asked, embed).tolist() == [[1.5], [2.5]]
    assert embed.sizes == [2]


def test_a_model_is_recognised_by_its_memory() -> None:
    """Taking a record apart gives new objects for the same tensors."""
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL.detach()], [[FIRST, THIRD]]):
        pool.embed(MODEL, FIRST, embed)
        pool.embed(MODEL, THIRD, embed)
    assert embed.sizes == [3]


def test_one_group_at_a_time() -> None:
    pool = EmbeddingPool()
    with (
        pool.holding([MODEL], [[FIRST]]),
        pytest.raises(RuntimeError, match="one group"),
        pool.holding([MODEL], [[THIRD]]),
    ):
        pass


def test_nothing_is_held_afterwards() -> None:
    pool, embed = EmbeddingPool(), Embedder()
    with pytest.raises(RuntimeError), pool.holding([MODEL], [[FIRST, THIRD]]):
        raise RuntimeError
    pool.embed(MODEL, FIRST, embed)
    assert embed.sizes == [2]
