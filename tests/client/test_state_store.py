"""Client states in databases that many clients share."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from knnper.client.state_store import ClientStateStore
from knnper.errors import CheckpointError, RunError
from knnper.strategies.core.records import ModelState
from tests.datastore.small_store import forked


def state(value: float, size: int = 2) -> ModelState:
    return ModelState(torch.full((size,), float(value)))


def value_of(store: ClientStateStore, client: str, after_round: int) -> float | None:
    loaded = store.load(ModelState, client, after_round)
    return None if loaded is None else float(loaded.weights[0])


def databases(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sqlite"))


def kept(folder: Path, client: str) -> list[int]:
    """Return the rounds of which there is a state."""
    rounds: list[int] = []
    for path in databases(folder):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            query = "SELECT round FROM states WHERE client = ?"
            rounds += [number for (number,) in connection.execute(query, (client,))]
    return sorted(rounds)


@pytest.fixture
def store(tmp_path: Path) -> ClientStateStore:
    return ClientStateStore(tmp_path)


def test_a_round_sees_only_what_was_before_it(store: ClientStateStore) -> None:
    for client, number in (("0001", 2), ("0001", 5), ("0002", 3)):
        store.save(client, number, state(number), keep=[0])
    values = [value_of(store, "0001", number) for number in (5, 4, 2, 1)]
    assert values == [5, 2, 2, None]
    store.save("0001", 5, state(6), keep=[0])
    assert value_of(store, "0001", 5) == 6, "a repeated round replaces its state"


def test_the_state_at_each_checkpoint_stays(
    store: ClientStateStore, tmp_path: Path
) -> None:
    for number in (2, 5, 6, 9, 13, 14):
        store.save("0001", number, state(number), keep=[0])
    store.save("0001", 15, state(15), keep=[4, 8, 12])
    # 2 at 4, 6 at 8, 9 at 12; and all since.
    assert kept(tmp_path, "0001") == [2, 6, 9, 13, 14, 15]
    store.save("0001", 16, state(16), keep=[14])
    assert kept(tmp_path, "0001") == [14, 15, 16]


def test_states_after_the_round_of_the_server_are_deleted(
    store: ClientStateStore, tmp_path: Path
) -> None:
    for number in (3, 6, 8):
        store.save("0001", number, state(number), keep=[0])
    assert value_of(store, "0001", 5) == 3.0
    assert kept(tmp_path, "0001") == [3, 6, 8], "an evaluation deletes nothing"
    store.load(ModelState, "0001", 5, delete_later=True)
    assert kept(tmp_path, "0001") == [3]
    store.save("0001", 6, state(-6.0), keep=[5])
    assert value_of(store, "0001", 8) == -6.0


@dataclass
class InMemory:
    """One client's states by round: what the store is to do, said in dictionaries."""

    own: dict[int, float] = field(default_factory=dict)

    def load(self, after_round: int) -> float | None:
        known = [number for number in self.own if number <= after_round]
        return self.own[max(known)] if known else None

    def delete_after(self, after_round: int) -> None:
        for number in [number for number in self.own if number > after_round]:
            del self.own[number]

    def save(self, server_round: int, value: float, keep: Collection[int]) -> None:
        self.own[server_round] = value
        latest = max(keep, default=0)
        needed = {
            max((r for r in self.own if r <= wanted_round), default=0)
            for wanted_round in keep
        }
        for number in list(self.own):
            if number <= latest and number not in needed:
                del self.own[number]


rounds = some.integers(1, 9)
clients = some.sampled_from(["0001", "0002", "a site; DROP TABLE states", "Zoë"])
Step = tuple[str, str, int, list[int]]
loads: some.SearchStrategy[Step] = some.tuples(
    some.sampled_from(["load", "resume"]), clients, some.integers(0, 9), some.just([])
)
saves = some.tuples(
    some.just("save"), clients, rounds, some.lists(some.integers(0, 9), max_size=3)
)


@given(some.lists(some.one_of(loads, saves), max_size=25))
@settings(deadline=None, max_examples=60)
def test_it_does_what_dictionaries_do(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, int, list[int]]],
) -> None:
    folder = tmp_path_factory.mktemp("states")
    expected: dict[str, InMemory] = {}
    for number, (kind, client, server_round, keep) in enumerate(steps):
        memory = expected.setdefault(client, InMemory())
        store = ClientStateStore(folder)  # nothing is kept in memory
        if kind == "save":
            store.save(client, server_round, state(number), keep)
            memory.save(server_round, number, keep)
        else:
            if kind == "resume":
                store.load(ModelState, client, server_round, delete_later=True)
                memory.delete_after(server_round)
            assert value_of(store, client, server_round) == memory.load(server_round)
        assert kept(folder, client) == sorted(memory.own)
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [0, 1, 1000, 2**19])
def test_the_bits_come_back(store: ClientStateStore, size: int) -> None:
    written = ModelState(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    store.save("0001", 1, written, keep=[0])
    loaded = store.load(ModelState, "0001", 1)
    assert loaded is not None
    assert loaded.weights.shape == (size,)
    assert loaded.weights.numpy().tobytes() == written.weights.numpy().tobytes()


def test_many_clients_are_few_files(store: ClientStateStore, tmp_path: Path) -> None:
    for client in range(600):
        store.save(f"{client:04d}", 1, state(client), keep=[0])
    files = [path.name for path in tmp_path.iterdir()]
    assert len(files) <= 2 * 256
    assert {path.rpartition(".")[2] for path in files} == {"sqlite", "sqlite-journal"}
    assert [value_of(store, f"{number:04d}", 1) for number in (0, 567)] == [0.0, 567.0]


@pytest.mark.parametrize("size", [100, 2**19])
def test_the_room_of_earlier_rounds_is_used_again(
    store: ClientStateStore, tmp_path: Path, size: int
) -> None:
    sizes = []
    for server_round in range(1, 31):
        client_state = state(server_round, size)
        store.save("0001", server_round, client_state, keep=[max(server_round - 2, 0)])
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert sizes[-1] == sizes[9]
    # The three that are needed, one that is written meanwhile, pages of its own.
    assert sizes[-1] <= 4 * (4 * size) + 2**20


def test_nothing_is_made_for_a_client_without_state(
    store: ClientStateStore, tmp_path: Path
) -> None:
    assert value_of(store, "0001", 1) is None
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_sqlite_would_not_take_is_refused(
    store: ClientStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.client.state_store.MOST_BYTES", 1000)
    store.save("0001", 1, state(1.0), keep=[0])
    with pytest.raises(RunError, match=r"client '0001' has 4,\d+ bytes, expected at m"):
        store.save("0001", 2, state(2.0, size=1000), keep=[0])
    assert value_of(store, "0001", 2) == 1.0


def test_a_damaged_state_is_named(store: ClientStateStore, tmp_path: Path) -> None:
    for content in (b"", b"x", b"\x02" + bytes(7) + b"{}", b"\xff" * 200):
        store.save("0001", 1, state(1.0), keep=[0])
        (path,) = databases(tmp_path)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE states SET state = ?", (content,))
            connection.commit()
        with pytest.raises(
            CheckpointError, match=r"state of client '0001' in .*sqlite"
        ):
            store.load(ModelState, "0001", 1)


def test_flipped_byte_in_a_state_is_noticed_or_harmless(
    store: ClientStateStore, tmp_path: Path
) -> None:
    store.save("0001", 3, state(1.25, size=5), keep=[])
    (database,) = databases(tmp_path)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        ((content,),) = connection.execute("SELECT state FROM states").fetchall()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            with connection:
                connection.execute("UPDATE states SET state = ?", (bytes(flipped),))
            with contextlib.suppress(CheckpointError):
                loaded = store.load(ModelState, "0001", 3)
                assert loaded is not None
                assert loaded.weights.tolist() == [1.25] * 5, place
        with connection:
            connection.execute("UPDATE states SET state = ?, round = 2", (content,))
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.load(ModelState, "0001", 3)


def test_a_damaged_database_is_named(store: ClientStateStore, tmp_path: Path) -> None:
    store.save("0001", 1, state(1.0), keep=[0])
    (path,) = databases(tmp_path)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="remove the run's folder and start"):
        store.load(ModelState, "0001", 1)
    with pytest.raises(CheckpointError, match=r"state of client '0001' in .*sqlite"):
        store.save("0001", 2, state(2.0), keep=[0])


SIZES = {"small": 50, "large": 200_000}


def work(folder: Path, client: str, size: int, pipe: Connection) -> None:
    """Save and load a client's state, round after round, until it is killed."""
    torch.set_num_threads(1)  # a fork's other threads are gone
    store = ClientStateStore(folder)
    first = int(value_of(store, client, 10**9) or 0) + 1
    for server_round in itertools.count(first):
        assert value_of(store, client, server_round - 1) in (server_round - 1, None)
        keep = [max(server_round - 3, 0), server_round - 1]
        store.save(client, server_round, state(server_round, size), keep)
        pipe.send_bytes(json.dumps(server_round).encode())


def last_word(pipe: Connection, before: int) -> int:
    """Return the last round that a process which is no more has told of."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while pipe.poll():
            before = json.loads(pipe.recv_bytes())
    return before


@contextlib.contextmanager
def working(
    folder: Path, clients: Sequence[str], size: int
) -> Iterator[tuple[Sequence[Connection], list[int]]]:
    """Let a process for each client work; kill them all, and say how far they were."""
    children = [forked(work, folder, client, size) for client in clients]
    last_rounds: list[int] = []
    try:
        yield [pipe for _, pipe in children], last_rounds
    finally:
        for child, _ in children:
            assert child.exitcode is None, "a worker failed before it was killed"
            os.kill(child.pid or 0, signal.SIGKILL)
        for child, pipe in children:
            child.join()
            last_rounds.append(last_word(pipe, 0))
            pipe.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind", ["small", pytest.param("large", marks=pytest.mark.slow)]
)
def test_a_kill_at_any_time_leaves_whole_states(tmp_path: Path, kind: str) -> None:
    # These share a database.
    clients, size, waits = ("0", "26", "369"), SIZES[kind], np.random.default_rng(0)
    held = dict.fromkeys(clients, 0)
    for _ in range(12):
        with working(tmp_path, clients, size) as (pipes, last_rounds):
            for pipe in pipes[: int(waits.integers(4))]:
                assert pipe.poll(60)
            time.sleep(waits.uniform(0, 0.05))
        assert len(databases(tmp_path)) <= 1
        store = ClientStateStore(tmp_path)
        for client, last in zip(clients, last_rounds, strict=True):
            loaded = store.load(ModelState, client, 10**9)
            weights = torch.zeros(size) if loaded is None else loaded.weights
            assert torch.equal(weights, torch.full((size,), float(weights[0])))
            # What was acknowledged, or what was just being written.
            acknowledged = max(held[client], last)
            held[client] = int(weights[0])
            assert held[client] in (acknowledged, acknowledged + 1)
    assert min(held.values()) > 5, "the workers got nowhere"
