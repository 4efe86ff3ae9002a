"""Updates of a few weights, as clients a, b, c ... would send them."""

from collections.abc import Sequence

import torch

from knnper.seeding import RandomKey
from knnper.strategies.core.records import ModelUpdate

Updates = list[tuple[str, ModelUpdate]]


def updates(*models: Sequence[float], examples: Sequence[int] = ()) -> Updates:
    """Return one update a model, of one example each if it is not said."""
    sizes = examples or [1] * len(models)
    pairs = zip(models, sizes, strict=True)
    return [
        (chr(ord("a") + i), ModelUpdate(torch.tensor(model), size, 0.5))
        for i, (model, size) in enumerate(pairs)
    ]


def on_a_line(*positions: float) -> Updates:
    """Return updates of two weights, of which the second is 0."""
    return updates(*([float(position), 0.0] for position in positions))


def random_updates(num_clients: int, num_weights: int, seed: int) -> Updates:
    """Return updates that differ in weights and numbers of examples."""
    generator = RandomKey(seed).numpy()
    models = generator.normal(size=(num_clients, num_weights)).astype("float32")
    sizes = generator.integers(1, 9, num_clients)
    return updates(*models.tolist(), examples=sizes.tolist())
