"""A store whose process is killed at random moments, again and again.

Each time: nothing acknowledged is lost, nothing deleted comes back, an operation that
was under way happened as a whole or not at all, and labels match inputs and vectors.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import InputLayout, NewExamples, Selection, StoreSpec
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import Store, StoreReader, create_store, open_store
from knnper.datastore.verify import verify
from tests.datastore.index_kinds import KINDS
from tests.datastore.small_store import forked

DIM = 48
SPEC = StoreSpec(5, InputLayout((DIM,), "int64"))
MODELS = ("first", "second", "third")
OPERATIONS = ("add", "delete", "reembed", "save")


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
            kind = generator.choice(OPERATIONS, p=[0.6, 0.2, 0.1, 0.1])
            _change(store, str(kind), generator, tell)


def _change(store: Store, kind: str, generator: np.random.Generator, tell: Any) -> None:
    held = store.contents().ids.tolist()
    if kind == "add":
        _add(store, generator, tell)
    elif kind == "delete" and held:
        ids = sorted({int(example_id) for example_id in generator.choice(held, 3)})
        tell("delete", ids)
        tell("deleted", store.delete(Selection(ids=tuple(ids))).tolist())
    elif kind == "reembed" and held:
        model = str(generator.choice(MODELS))
        tell("reembed", model)
        store.reembed(lambda inputs: embed(inputs, model), model)
        tell("reembedded")
    elif kind == "save":
        tell("save")
        store.save()
        tell("saved")


def _add(store: Store, generator: np.random.Generator, tell: Any) -> None:
    count = int(generator.choice([1, 1, 7, 40]))
    labels = generator.integers(0, SPEC.num_classes, count).tolist()
    first = store._live.state.stream.num_offered + 1
    tell("add", first, labels)
    inputs = torch.tensor([input_of(first + i, y) for i, y in enumerate(labels)])
    new = NewExamples(embed(inputs, store.fingerprint), torch.tensor(labels), inputs)
    added = store.add(new)
    tell("added", added.ids.tolist(), added.evicted.tolist())


CAPACITY, NUM_REMEMBERED = 120, 40


@dataclass
class Expected:
    """What must be in the store, and the last to have left no byte: label by id."""

    labels: dict[int, int] = field(default_factory=dict)
    fingerprint: str = "first"
    deleted: dict[int, int] = field(default_factory=dict)

    def after(self, operation: list[Any]) -> "Expected":
        """Return what is expected once an operation is done."""
        kind, *words = operation
        if kind == "add":
            first, labels = words
            held = {**self.labels, **dict(enumerate(labels, start=first))}
            # First in, first out.
            kept = {
                example_id: held[example_id] for example_id in sorted(held)[-CAPACITY:]
            }
            return replace(self, labels=kept)
        if kind == "delete":
            left = dict(self.labels)
            removed = {
                example_id: left.pop(example_id)
                for example_id in words[0]
                if example_id in left
            }
            deleted = list({**self.deleted, **removed}.items())[-NUM_REMEMBERED:]
            return replace(self, labels=left, deleted=dict(deleted))
        return replace(self, fingerprint=words[0]) if kind == "reembed" else self


def killed_after(folder: Path, seed: int, seconds: float) -> list[list[Any]]:
    """Return what a process said until it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            work(folder, seed, write)
        finally:
            os._exit(1)
    os.close(write)
    received = os.read(read, 2**16)
    assert received, "the process ended before it could open the store"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while part := os.read(read, 2**16):
        received += part
    os.close(read)
    assert os.WIFSIGNALED(status), "the process failed before it was killed"
    # The last line may be cut short.
    return [json.loads(line) for line in received.split(b"\n")[:-1]]


def play(operations: list[list[Any]], before: Expected) -> tuple[Expected, Expected]:
    """Return what must be there, and what may be there instead."""
    sure, under_way = before, None
    for words in operations:
        if words[0] in OPERATIONS:
            under_way = words
        elif under_way is not None:
            sure, under_way = sure.after(under_way), None
    return sure, sure if under_way is None else sure.after(under_way)


def require_sound(store: StoreReader, *allowed: Expected) -> Expected:
    """Return which of the states the store holds; fail if it is none."""
    contents = store.contents()
    labels = dict(zip(contents.ids.tolist(), contents.labels.tolist(), strict=True))
    held = (labels, store.fingerprint)
    matching = [state for state in allowed if (state.labels, state.fingerprint) == held]
    assert matching, "the store holds neither the state before nor one after"
    inputs = torch.tensor(
        [input_of(state, label) for state, label in labels.items()]
    ).reshape(-1, DIM)
    assert torch.equal(store.inputs(contents.ids).reshape(-1, DIM), inputs)
    vectors = embed(inputs, store.fingerprint)
    assert torch.equal(store.vectors(contents.ids), vectors)
    assert sorted(store._live.view.index.ids.tolist()) == contents.ids.tolist()
    if labels and store.settings.index.ranks_exactly:
        neighbors = store.search(vectors, 1)
        assert np.array_equal(neighbors.ids[:, 0].numpy(), contents.ids)
        assert neighbors.labels[:, 0].tolist() == list(labels.values())
    return matching[0]


def _open_on_and_on(folder: Path, pipe: Connection) -> None:
    count = 0
    while not pipe.poll():
        with open_store(folder) as reader:
            reader.contents()
        count += 1
    pipe.send(count)


@contextlib.contextmanager
def opened_meanwhile(folder: Path) -> Iterator[None]:
    """Let another process open a store again and again."""
    reader, parent_end = forked(_open_on_and_on, folder)
    try:
        yield
    finally:
        parent_end.send("end")
        reader.join()
    assert reader.exitcode == 0
    assert parent_end.recv() > 5


def kill_again_and_again(folder: Path, kind: str, num_kills: int) -> set[str]:
    """Return the operations that were under way when a process was killed."""
    index = KINDS[kind]
    settings = StoreSettings("fifo", CAPACITY, index=index)
    create_store(folder, SPEC, DIM, "first", settings).close()
    generator = np.random.default_rng(7)
    expected, cut_short = Expected(), set()
    for number in range(num_kills):
        # Short and long lives: opening, single operations, and long histories.
        operations = killed_after(folder, number, float(generator.exponential(0.08)))
        if operations[-1][0] in OPERATIONS:
            cut_short.add(operations[-1][0])
        with open_store(folder) as reader:
            expected = require_sound(reader, *play(operations, expected))
        if number % 2:
            # What a writer tidies up leaves the same state.
            with open_store(folder, writable=True) as store:
                require_sound(store, expected)
            require_erased(folder, expected.deleted)
    return cut_short


def require_erased(folder: Path, deleted: dict[int, int]) -> None:
    """Fail if a file has the first bytes of a deleted input or embedding."""
    files = (path for path in folder.rglob("*") if path.is_file())
    content = b"".join(path.read_bytes() for path in files)
    for example_id, label in deleted.items():
        numbers = torch.tensor([input_of(example_id, label)])
        secrets = [numbers, *(embed(numbers, model) for model in MODELS)]
        for secret in secrets:
            assert secret.numpy().tobytes()[:64] not in content


@pytest.mark.parametrize(
    "kind", ["flat", pytest.param("graph", marks=pytest.mark.integration)]
)
def test_nothing_is_lost_when_the_process_is_killed(tmp_path: Path, kind: str) -> None:
    kill_again_and_again(tmp_path / "store", kind, num_kills=6)


@pytest.mark.integration
@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_store_that_is_written_is_not_taken_for_damaged(
    tmp_path: Path, num_kills: int
) -> None:
    folder = tmp_path / "store"
    settings = StoreSettings("fifo", CAPACITY)
    create_store(folder, SPEC, DIM, "first", settings).close()
    generator = np.random.default_rng(11)
    before = [Expected()]
    with opened_meanwhile(folder):
        for number in range(num_kills):
            operations = killed_after(
                folder, number, float(generator.exponential(0.05))
            )
            allowed = [
                expected for known in before for expected in play(operations, known)
            ]
            with open_store(folder) as reader:
                state = require_sound(reader, *allowed)
            # What was under way may be seen later: as long as somebody reads, SQLite
            # does not look what else a process that was killed has left in the log.
            place = allowed.index(state)
            before = allowed[place : place + 2 - place % 2]
    # An erasure that was cut short is made up for.
    open_store(folder, writable=True).close()
    assert verify(folder).findings == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_kills"), [("flat", 200), ("graph", 100), ("scalar", 100)]
)
def test_nothing_is_lost_in_many_kills(
    tmp_path: Path, kind: str, num_kills: int
) -> None:
    cut_short = kill_again_and_again(tmp_path / "store", kind, num_kills)
    assert cut_short == set(OPERATIONS)
