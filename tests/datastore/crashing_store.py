"""A process that works on a store until it is killed, and says what it has done.

Every line on the pipe is one JSON list. Before an operation the process says what it is
about to do, after it what was acknowledged:

    ["add", first_id, [labels], number]       then  ["added", [ids], [evicted]]
    ["delete", [ids]]                         then  ["deleted", [ids]]
    ["reembed", fingerprint]                  then  ["reembedded"]
    ["save"]                                  then  ["saved"]
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnper.datastore.examples import InputLayout, NewExamples, Selection, StoreSpec
from knnper.datastore.store import Store, open_store

DIM = 48
SPEC = StoreSpec(5, InputLayout((DIM,), "int64"))
MODELS = ("first", "second", "third")


def input_of(example: int, label: int) -> list[int]:
    """Return an input that tells id and label, and differs in every place."""
    return [1000 * example + 10 * place + label for place in range(DIM)]


def embed(inputs: Tensor, model: str) -> Tensor:
    """Return embeddings that tell input and model."""
    return inputs.float() + MODELS.index(model) * 0.25


def work(folder: Path, seed: int, pipe: int) -> None:
    """Change the store in ``folder`` at random until the process is killed."""
    generator = np.random.default_rng(seed)

    def tell(*words: Any) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    with open_store(folder, writable=True) as store:
        tell("opened")
        while True:
            kind = generator.choice(
                ["add", "delete", "reembed", "save"], p=[0.6, 0.2, 0.1, 0.1]
            )
            OPERATIONS[str(kind)](store, generator, tell)


def _add(store: Store, generator: np.random.Generator, tell: Any) -> None:
    count = int(generator.choice([1, 1, 7, 40]))
    labels = generator.integers(0, SPEC.num_classes, count).tolist()
    first = store._live.head.stream.num_offered + 1
    tell("add", first, labels)
    inputs = torch.tensor([input_of(first + i, y) for i, y in enumerate(labels)])
    new = NewExamples(embed(inputs, store.fingerprint), torch.tensor(labels), inputs)
    added = store.add(new)
    tell("added", added.ids.tolist(), added.evicted.tolist())


def _delete(store: Store, generator: np.random.Generator, tell: Any) -> None:
    held = store.contents().ids.tolist()
    if not held:
        return
    ids = sorted({int(one) for one in generator.choice(held, 3)})
    tell("delete", ids)
    tell("deleted", store.delete(Selection(ids=tuple(ids))).tolist())


def _reembed(store: Store, generator: np.random.Generator, tell: Any) -> None:
    if len(store) == 0:
        return
    model = str(generator.choice(MODELS))
    tell("reembed", model)
    store.reembed(lambda inputs: embed(inputs, model), model)
    tell("reembedded")


def _save(store: Store, generator: np.random.Generator, tell: Any) -> None:
    tell("save")
    store.save()
    tell("saved")


OPERATIONS = {"add": _add, "delete": _delete, "reembed": _reembed, "save": _save}


def lines(received: bytes) -> Iterator[list[Any]]:
    """Return the whole lines that a killed process left on the pipe."""
    for line in received.split(b"\n")[:-1]:
        yield json.loads(line)
