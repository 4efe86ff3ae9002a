"""A small store that many tests begin with."""

from pathlib import Path

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
    return [int(one) for one in store.contents().ids]
