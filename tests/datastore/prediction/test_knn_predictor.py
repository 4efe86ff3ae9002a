"""The predictor over a hand-made embedding of one-pixel images."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from knnper.datastore.prediction import KnnPredictor, NeighborClassifier
from knnper.datastore.store import memory_store
from knnper.errors import DataError


@dataclass
class PixelEmbedding:
    """φ(x) is the pixel; remembers how many images each call had."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        return images.flatten(start_dim=1).float()


def head(embeddings: Tensor) -> Tensor:
    return torch.tensor([0.25, 0.75]).repeat(len(embeddings), 1)


def predictor(
    pixels: list[int],
    labels: list[int],
    knn_weight: float,
    embed: Callable[[Tensor], Tensor] | None = None,
) -> KnnPredictor:
    embeddings = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1)
    store = memory_store(embeddings, torch.tensor(labels, dtype=torch.int64), 2)
    neighbors = NeighborClassifier(store, 1, "paper", 1.0)
    return KnnPredictor(embed or PixelEmbedding(), head, neighbors, knn_weight)


def image(*pixels: int) -> Tensor:
    return torch.tensor(pixels, dtype=torch.uint8).reshape(-1, 1, 1, 1)


def test_the_mixture_by_hand() -> None:
    served = predictor([10, 200], [0, 1], knn_weight=0.5)

    torch.testing.assert_close(
        served(image(0, 255)), torch.tensor([[0.625, 0.375], [0.125, 0.875]])
    )


def test_images_are_embedded_once() -> None:
    embed = PixelEmbedding()
    predictor([10, 200], [0, 1], 0.5, embed)(image(1, 2, 3))

    assert embed.calls == [3]


@pytest.mark.parametrize("knn_weight", [0.0, 0.3, 1.0])
def test_an_empty_store_serves_the_global_model(knn_weight: float) -> None:
    served = predictor([], [], knn_weight)

    assert served(image(0, 255)).tolist() == [[0.25, 0.75]] * 2
    assert served.describe() == {"knn_weight": 0.0, "num_stored": 0.0}


def test_no_images_have_no_probabilities() -> None:
    assert predictor([10], [0], 0.5)(image()).shape == (0, 2)


def test_what_was_chosen_is_described() -> None:
    described = predictor([10, 200], [0, 1], knn_weight=0.7).describe()

    assert described == {"knn_weight": 0.7, "num_stored": 2.0}


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    served = predictor([10], [0], 0.5, lambda images: torch.full((1, 1), torch.nan))

    with pytest.raises(DataError, match=r"queries: .* row 0; the model .* diverged"):
        served(image(1))
