"""Small stores for the tests of what looks at them."""

from pathlib import Path

import numpy as np
import torch

from knnper.datastore.examples import InputLayout, NewExamples, StoreSpec
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import Store, create_store

SHAPE, DIM = (4, 4, 3), 6
SPEC = StoreSpec(3, InputLayout(SHAPE), ("cat", "dog", "fox"))


def some(count: int, seed: int = 0, name: str | None = None) -> NewExamples:
    """Return examples; with ``name``, external ids that begin with it."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    return NewExamples(
        embeddings=torch.from_numpy(rng.normal(size=(count, DIM)).astype(np.float32)),
        labels=torch.arange(count) % 3,
        inputs=torch.from_numpy(inputs),
        external_ids=None
        if name is None
        else tuple(f"{name}/{number}" for number in range(count)),
        arrivals=torch.arange(count, dtype=torch.float64) + 1000,
    )


def small_store(
    folder: Path, settings: StoreSettings | None = None, count: int = 30
) -> Store:
    """Return a new store of some examples, open to write."""
    store = create_store(folder, SPEC, DIM, "first", settings)
    store.add(some(count, name="file"))
    return store
