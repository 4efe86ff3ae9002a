"""What methods ask of a task: predictions, layers, kept embeddings."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import Examples
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.strategies.core.embedding_pool import EmbeddingPool, KeptEmbeddings
from knnper.strategies.core.sharing import first_layers, layers_left
from knnper.strategies.core.training import local_sgd
from knnper.strategies.dapper import draw_proxy, draw_sample
from tests.strategies.tiny import KEY, noisy, normed_task


def test_predictions_are_made_in_evaluation_mode() -> None:
    task, train = normed_task(), noisy(8, 0, seed=1).train
    weights = local_sgd(task, task.initial_weights, train, 0.1, KEY).weights
    # BatchNorm in training mode would normalise with the other images' statistics.
    together = task.probabilities(weights, train.images)
    alone = [task.probabilities(weights, image[None]) for image in train.images]
    torch.testing.assert_close(torch.cat(alone), together)
    assert torch.equal(task.model.read(), weights)


def test_head_of_the_embeddings_is_the_model() -> None:
    task = dataclasses.replace(normed_task(), evaluation_batch_size=3)
    images, weights = noisy(8, 0, seed=1).train.images, task.initial_weights
    embeddings = task.embed(weights, images)
    assert embeddings.shape == (8, 4)
    expected = task.probabilities(weights, images)
    assert torch.equal(task.head(weights, embeddings), expected)
    logits = task.logits(weights, images)
    torch.testing.assert_close(logits.softmax(dim=1), expected)


def test_what_leaves_in_bfloat16_is_float32_and_close() -> None:
    exact = normed_task()
    mixed = normed_task(precision="bfloat16")
    images, weights = noisy(8, 0, seed=1).train.images, exact.initial_weights
    for name in ("embed", "logits", "probabilities"):
        expected = getattr(exact, name)(weights, images)
        output = getattr(mixed, name)(weights, images)
        assert output.dtype == torch.float32
        assert not torch.equal(output, expected)
        torch.testing.assert_close(output, expected, rtol=0.03, atol=0.03)
    assert torch.equal(
        mixed.head(weights, mixed.embed(weights, images)),
        mixed.probabilities(weights, images),
    )
    sums = mixed.probabilities(weights, images).sum(dim=1)
    torch.testing.assert_close(sums, torch.ones(8))


class Layered(EmbeddingModel):
    """A head that is defined first, and a body that begins with normalisation."""

    embedding_dim, num_classes = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.body = nn.Sequential(
            nn.BatchNorm2d(1),
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3, affine=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3, 4),
            nn.LayerNorm(4),
        )

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features


LAYERED = FlatModel(Layered())

LAYERS = [{"body.0", "body.1", "body.2"}, {"body.5", "body.6"}, {"classifier.1"}]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_normalisation_belongs_to_the_layer_before(count: int) -> None:
    mask = LAYERED.named(first_layers(LAYERED, count).float())
    layers = {name.rpartition(".")[0] for name, part in mask.items() if part.all()}
    left_out = {name.rpartition(".")[0] for name, part in mask.items() if part.any()}
    # Statistics, which have no gradient, go with their module.
    assert layers == left_out == set().union(*LAYERS[:count])


def test_one_layer_at_least_is_left() -> None:
    assert [layers_left(LAYERED, count, "num_x") for count in (0, 1, 2)] == [3, 2, 1]
    with pytest.raises(ConfigError, match=r"method\.num_x: found 3, .* most 2"):
        layers_left(LAYERED, 3, "num_x")


def pairs(examples: Examples) -> list[tuple[tuple[int, ...], int]]:
    both = zip(examples.images, examples.labels, strict=True)
    return [(tuple(image.flatten().tolist()), int(label)) for image, label in both]


def test_clients_get_other_examples() -> None:
    proxy = noisy(40, 0, seed=2).train
    task = replace(normed_task(), proxy=lambda: proxy)
    drawn = [draw_sample(task, 10, RandomKey(1).child(c)) for c in "ab"]
    assert not torch.equal(drawn[0].images, drawn[1].images)
    every = draw_sample(task, 1000, RandomKey(1))
    assert torch.equal(every.images.to(torch.uint8), proxy.images)
    assert torch.equal(every.labels.long(), proxy.labels)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (99, 9)])
def test_proxy_sample_has_the_set_size(count: int, expected: int) -> None:
    proxy = noisy(9, 0, seed=2).train
    task = replace(normed_task(), proxy=lambda: proxy)
    sample = draw_sample(task, 1000, RandomKey(1))
    drawn = draw_proxy(sample, task.spec, count, RandomKey(3))
    assert len(drawn) == expected
    assert drawn.images.dtype == torch.uint8
    assert set(pairs(drawn)) <= set(pairs(proxy))
    assert len(set(pairs(drawn))) == expected


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
    # A record that is taken apart has other objects for the same tensors.
    with pool.holding([MODEL.detach()], [FIRST, SECOND, THIRD]):
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
    ("weights", "images"), [(MODEL.clone(), FIRST), (MODEL, FIRST.clone())]
)
def test_what_is_not_held_is_computed_alone(weights: Tensor, images: Tensor) -> None:
    pool, embed = EmbeddingPool(), Embedder()
    with pool.holding([MODEL], [FIRST, THIRD]):
        assert pool.embed(weights, images, embed).tolist() == [[1.5], [2.5]]
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


def test_embeddings_are_computed_once_per_content() -> None:
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
            embeddings = pool.embed(WEIGHTS, parts[1], embed)
        assert embeddings.tolist() == [[1.5], [2.5], [3.5]]
        pool.embed(WEIGHTS, parts[0], embed)
    assert sizes == [3, 1, 1]
