"""Private answers from a store: durable charges, deletion, copies, damage, threads."""

import contextlib
import math
import os
import signal
import sqlite3
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import (
    NewExamples,
    Selection,
    StoreMismatchError,
)
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.datastore.private_memory import PrivateMemory
from knnper.datastore.store import (
    Store,
    create_store,
    empty_memory_store,
    open_store,
    write_store,
)
from knnper.datastore.tables import CHARGES
from knnper.datastore.verify import salvage, verify
from knnper.seeding import RandomKey
from tests.datastore.small_store import SPEC, examples, new_store

SETTINGS = PrivateAnswerSettings(epsilon=4.0, threshold=0.1)
# An answer costs what the release of the count costs, to a millionth.
# Each answer costs what the count costs; the budget is enough for 300,000.
COUNTING = replace(SETTINGS, epsilon=1e4, vote_noise=1e3, num_queries=10**6)


def memory_of(
    store: Store, settings: PrivateAnswerSettings = SETTINGS, seed: int = 0
) -> PrivateMemory:
    rng = RandomKey(seed).numpy()
    return PrivateMemory(store, settings, store.fingerprint, lambda: rng)


def queries(count: int, seed: int = 7) -> Tensor:
    return examples(count, seed).embeddings


def uniform(count: int) -> Tensor:
    return torch.full((count, SPEC.num_classes), 0.25)


def spent(store: Store) -> dict[int, float]:
    ids = store.contents().ids
    return dict(zip(ids.tolist(), store.charges(ids).tolist(), strict=True))


def test_charges_are_those_of_the_mechanism(tmp_path: Path) -> None:
    with new_store(tmp_path / "store", 8) as store:
        settings = replace(SETTINGS, threshold=0.5, vote_noise=0.5)
        memory = memory_of(store, settings)
        query = queries(1)
        answer = memory.predict(query, uniform(1))
        vectors = store.vectors(store.contents().ids)
        cosines = torch.nn.functional.cosine_similarity(vectors, query)
        num_voters = int((cosines >= 0.5).sum())
        noise = RandomKey(0).numpy().normal(0, settings.count_deviation)
        variance = 0.25 * max(num_voters + noise, 30)
        expected = torch.where(
            cosines >= 0.5,
            settings.count_charge + cosines.double() ** 2 / (2 * variance),
            0,
        )
        assert 0 < num_voters < 8
        np.testing.assert_allclose(
            list(spent(store).values()), expected.numpy(), rtol=1e-5
        )
        np.testing.assert_allclose(answer.probabilities.sum(1), 1, rtol=1e-6)


def test_charges_outlive_the_process_and_a_new_epsilon(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with new_store(folder, 8) as store:
        memory_of(store).predict(queries(5), uniform(5))
        before = spent(store)
    assert max(before.values()) > 0
    with open_store(folder, writable=True) as store:
        assert spent(store) == before
        memory = memory_of(store, PrivateAnswerSettings(epsilon=1e-3, threshold=0.1))
        # The new budget is below the charges: no example votes or is charged.
        memory.predict(queries(5), uniform(5))
        assert spent(store) == before


def test_store_without_private_answers_has_the_earlier_format(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with new_store(folder, 8) as store:
        assert set(spent(store).values()) == {0.0}
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite3")) as database:
        query = "SELECT count(*) FROM sqlite_master WHERE name = ?"
        assert database.execute(query, (CHARGES,)).fetchone() == (0,)


def test_store_of_the_first_release_gives_private_answers(tmp_path: Path) -> None:
    with tarfile.open("tests/golden/version_0_1_0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    with open_store(tmp_path / "store", writable=True) as store:
        memory_of(store).predict(torch.eye(6)[:4], uniform(4))
        assert max(spent(store).values()) > 0
    assert verify(tmp_path / "store").findings == ()


def test_deleted_example_takes_its_charges_along(tmp_path: Path) -> None:
    with new_store(tmp_path / "store", 8) as store:
        memory = memory_of(store)
        memory.predict(queries(20), uniform(20))
        before = spent(store)
        inputs = store.inputs(np.array([3]))
        vectors = store.vectors(np.array([3]))
        store.delete(Selection(ids=(3,)))
        assert spent(store) == {key: before[key] for key in before if key != 3}
        added = store.add(NewExamples(vectors, torch.tensor([2]), inputs))
        assert spent(store)[int(added.ids[0])] == 0
        memory.predict(vectors, uniform(1))
        assert spent(store)[int(added.ids[0])] > 0


def test_evicted_example_takes_its_charges_along(tmp_path: Path) -> None:
    with new_store(tmp_path / "store", 8, policy="fifo", capacity=8) as store:
        memory_of(store).predict(queries(5), uniform(5))
        store.add(examples(2, 3))
        with open_database(store) as database:
            rows = database.execute(f"SELECT id FROM {CHARGES} WHERE id < 3")
            assert rows.fetchall() == []


@contextlib.contextmanager
def open_database(store: Store) -> Iterator[sqlite3.Connection]:
    path = store._rows._path
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        yield database


def test_copies_of_a_store_keep_the_charges(tmp_path: Path) -> None:
    with new_store(tmp_path / "store", 8) as store:
        memory_of(store).predict(queries(5), uniform(5))
        before = spent(store)
        write_store(tmp_path / "written", store.serialized())
    salvage(tmp_path / "store", tmp_path / "salvaged")
    for name in ("written", "salvaged"):
        with open_store(tmp_path / name, writable=True) as copy:
            assert spent(copy) == before
        assert verify(tmp_path / name).findings == ()


def test_example_with_damaged_charges_never_votes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with new_store(folder, 8) as store:
        memory_of(store).predict(queries(5), uniform(5))
        before = spent(store)
        with open_database(store) as database:
            database.execute(f"UPDATE {CHARGES} SET spent = 0 WHERE id = 3")
        memory_of(store).predict(queries(5), uniform(5))
        assert memory_of(store).share_voting() == 7 / 8
        after = spent(store)
        assert math.isnan(after.pop(3))
        assert all(after[number] > before[number] for number in after)
    (finding,) = verify(folder).findings
    assert "the charges of 3 are not what was written" in finding.problem
    salvage(folder, tmp_path / "copy")
    with open_store(tmp_path / "copy", writable=True) as copy:
        assert spent(copy) == {**after, 3: math.inf}
        memory_of(copy).predict(queries(5), uniform(5))
        assert memory_of(copy).share_voting() == 7 / 8


def test_another_model_is_refused_and_charges_nothing(tmp_path: Path) -> None:
    with new_store(tmp_path / "store", 8) as store:
        memory = memory_of(store)
        memory.predict(queries(1), uniform(1))
        before = spent(store)
        store.reembed(lambda inputs: inputs * 3, "other")
        with pytest.raises(StoreMismatchError):
            memory.predict(queries(1), uniform(1))
        assert spent(store) == before
        memory_of(store).predict(queries(1), uniform(1))
        assert spent(store) != before


def test_answers_need_no_examples() -> None:
    with empty_memory_store(SPEC, 6, "model") as store:
        answer = memory_of(store).predict(queries(3), uniform(3))
        assert torch.equal(answer.probabilities, uniform(3))
        assert memory_of(store).share_voting() == 0


def test_threads_never_spend_the_same_budget_twice(tmp_path: Path) -> None:
    settings = PrivateAnswerSettings(epsilon=1.0, threshold=0.1, vote_noise=0.05)
    with new_store(tmp_path / "store", 40) as store:
        memory = PrivateMemory(store, settings, "model")
        deleted = threading.Event()

        def ask(seed: int) -> None:
            for number in range(20):
                memory.predict(queries(3, 100 * seed + number), uniform(3))

        def change() -> None:
            for number in range(5):
                store.add(examples(4, number + 50))
                store.delete(Selection(ids=(number + 1,)))
            deleted.set()

        in_threads(*(lambda seed=seed: ask(seed) for seed in range(4)), change)
        assert deleted.is_set()
        assert max(spent(store).values()) <= settings.budget * (1 + 1e-12)
        assert len(spent(store)) == 40 + 5 * 4 - 5


def in_threads(*tasks: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_noise_of_a_service_is_never_repeated() -> None:
    with empty_memory_store(SPEC, 6, "model") as store:
        memory = PrivateMemory(store, SETTINGS, store.fingerprint)
        draws = {memory._make_rng().normal() for _ in range(50)}
    assert len(draws) == 50


@pytest.mark.slow
def test_no_answer_leaves_before_its_charge_is_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    create_store(folder, SPEC, 6, "model").close()
    with open_store(folder, writable=True) as store:
        store.add(examples(40))
    generator = RandomKey(11).numpy()
    answered = 0
    charge = COUNTING.count_charge
    for _ in range(50):
        answered += answers_until_killed(folder, float(generator.uniform(0, 0.05)))
        with open_store(folder, writable=True) as store:
            recorded = round(max(spent(store).values()) / charge)
            assert answered <= recorded <= answered + 1
            answered = recorded
        assert verify(folder).findings == ()
    assert answered > 50


def answers_until_killed(folder: Path, seconds: float) -> int:
    """Answer queries in a process that is killed; return how many answers left it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            with open_store(folder, writable=True) as store:
                memory = memory_of(store, COUNTING)
                os.write(write, b"opened\n")
                while True:
                    memory.predict(queries(1), uniform(1))
                    os.write(write, b"answer\n")
        finally:
            os._exit(1)
    os.close(write)
    received = os.read(read, 2**16)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(read, 2**16):
        received += part
    os.close(read)
    assert received.startswith(b"opened")
    return received.count(b"answer")
