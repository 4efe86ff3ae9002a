from pathlib import Path

import pytest
import torch

from knnper.client.runtime import ClientStateStore
from knnper.errors import CheckpointError
from knnper.strategies.core.records import ModelState


def state(value: float) -> ModelState:
    return ModelState(torch.tensor([value, value]))


def value_of(loaded: ModelState | None) -> float | None:
    return None if loaded is None else float(loaded.weights[0])


def test_a_first_visit_has_no_state(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    assert store.load(ModelState, "0001", after_round=0) is None


def test_a_round_sees_only_what_was_before_it(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.save("0001", 2, state(2.0), keep=[0])
    store.save("0001", 5, state(5.0), keep=[0])
    store.save("0002", 3, state(9.0), keep=[0])
    assert value_of(store.load(ModelState, "0001", 1)) is None
    assert value_of(store.load(ModelState, "0001", 2)) == 2.0
    assert value_of(store.load(ModelState, "0001", 4)) == 2.0
    assert value_of(store.load(ModelState, "0001", 5)) == 5.0


def test_a_repeated_round_replaces_its_state(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.save("0001", 2, state(2.0), keep=[0])
    store.save("0001", 2, state(3.0), keep=[0])
    assert value_of(store.load(ModelState, "0001", 2)) == 3.0


def test_what_no_checkpoint_needs_goes(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    for server_round in (1, 3, 4):
        store.save("0001", server_round, state(float(server_round)), keep=[0])
    store.save("0001", 7, state(7.0), keep=[3])
    names = sorted(path.name for path in (tmp_path / "0001").iterdir())
    assert names == [f"round-00000{r}.safetensors" for r in (3, 4, 7)]


def test_the_state_at_each_checkpoint_stays(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    for server_round in (2, 5, 6, 9, 13, 14):
        store.save("0001", server_round, state(float(server_round)), keep=[0])
    store.save("0001", 15, state(15.0), keep=[4, 8, 12])
    # 2 at 4, 6 at 8, 9 at 12; and all since.
    assert kept(tmp_path / "0001") == [2, 6, 9, 13, 14, 15]


def test_what_counts_no_longer_is_put_aside_until_it_is_passed(tmp_path: Path) -> None:
    store, aside = ClientStateStore(tmp_path), tmp_path / "0001" / "aside"
    for server_round in (3, 6, 8):
        store.save("0001", server_round, state(float(server_round)), keep=[0])
    assert value_of(store.load(ModelState, "0001", 3)) == 3.0
    assert (kept(tmp_path / "0001"), kept(aside)) == ([3], [6, 8])
    store.save("0001", 5, state(-5.0), keep=[4])
    assert kept(aside) == [6, 8]
    # The server thinks better of it: what it did in round 8 counts after all.
    assert value_of(store.load(ModelState, "0001", 8)) == 8.0
    assert value_of(store.load(ModelState, "0001", 5)) == -5.0
    store.save("0001", 9, state(-9.0), keep=[4, 8])
    assert not aside.exists()


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem[-6:]) for path in folder.glob("*.safetensors"))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.save("0001", 1, state(1.0), keep=[0])
    (tmp_path / "0001" / "round-000001.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="state of client '0001'"):
        store.load(ModelState, "0001", 1)
