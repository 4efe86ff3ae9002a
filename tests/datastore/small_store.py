"""A small store that many tests begin with."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import torch

from knnper.datastore.examples import InputLayout, NewExamples, StoreSpec
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import Store, StoreReader, create_store
from knnper.seeding import RandomKey

SPEC = StoreSpec(4, InputLayout((6,), "float32"), ("a", "b", "c", "d"))


def examples(count: int, seed: int = 0, dim: int = 6) -> NewExamples:
    drawn = RandomKey(seed).numpy().normal(size=(count, dim)).astype("float32")
    inputs = torch.from_numpy(drawn)
    return NewExamples(inputs * 2, torch.arange(count) % 4, inputs)


def new_store(folder: Path, count: int = 0, **settings: object) -> Store:
    store = create_store(folder, SPEC, 6, "model", StoreSettings(**settings))  # type: ignore[arg-type]
    if count:
        store.add(examples(count))
    return store


def ids(store: StoreReader) -> list[int]:
    return [int(example_id) for example_id in store.contents().ids]


IMAGE_SHAPE, IMAGE_DIM = (4, 4, 3), 6
IMAGES = StoreSpec(3, InputLayout(IMAGE_SHAPE), ("cat", "dog", "fox"))


def some(count: int, seed: int = 0, name: str | None = None) -> NewExamples:
    """Return examples; with ``name``, external ids that begin with it."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 256, (count, *IMAGE_SHAPE), dtype=np.uint8)
    return NewExamples(
        embeddings=torch.from_numpy(
            rng.normal(size=(count, IMAGE_DIM)).astype(np.float32)
        ),
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
    store = create_store(folder, IMAGES, IMAGE_DIM, "first", settings)
    store.add(some(count, name="file"))
    return store


def forked(
    target: Callable[..., object], *args: object
) -> tuple[ForkProcess, Connection]:
    """Start a process that calls ``target`` with a pipe last; return its other end."""
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    child = context.Process(target=target, args=(*args, child_end))
    child.start()
    child_end.close()
    return child, parent_end
