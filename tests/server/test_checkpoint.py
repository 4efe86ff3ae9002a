import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from knnper.errors import CheckpointError
from knnper.records import fingerprint
from knnper.server.run_folder import Checkpoint, CheckpointFolder, History
from knnper.server.screening import Norms
from knnper.strategies.core.records import ModelState


def state(value: float) -> ModelState:
    return ModelState(torch.full((5,), value))


def latest_of(folder: CheckpointFolder) -> Checkpoint:
    latest = folder.load_latest(ModelState)
    assert latest is not None
    return latest


def test_the_newest_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", "abc")
    assert folder.load_latest(ModelState) is None
    for server_round in (1, 2, 3):
        folder.save(server_round, state(float(server_round)))
    latest = latest_of(folder)
    assert latest.server_round == 3
    assert latest.state.weights.tolist() == [3.0] * 5
    assert latest.fingerprint == fingerprint(state(3.0))


@pytest.mark.parametrize(
    ("most", "every", "expected"),
    [
        (1, 1, [100]),
        (2, 1, [99, 100]),
        (6, 1, [80, 88, 96, 98, 99, 100]),
        (8, 1, [64, 80, 88, 96, 97, 98, 99, 100]),
        (6, 5, [40, 80, 85, 90, 95, 100]),
        (6, 20, [20, 40, 60, 80, 100]),
    ],
)
def test_older_ones_are_kept_at_growing_distances(
    tmp_path: Path, most: int, every: int, expected: list[int]
) -> None:
    folder = CheckpointFolder(tmp_path, "abc", most)
    assert folder.ways_back() == [0]
    for server_round in range(every, 101, every):
        folder.save(server_round, state(1.0))
    assert folder.ways_back() == folder.rounds() == expected


def test_what_the_rounds_tell_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    norms = {"weights": Norms([0.1, 1 / 3], 0.1)}
    history = History(norms, lowest_loss=2 / 3, trained_in={"a": 2})
    folder.save(1, state(1.0))
    folder.save(2, state(2.0), history)
    latest = latest_of(folder)
    assert latest.history == history
    assert latest.history.state_rounds(["b", "a"], 9) == (0, 2)


def test_one_of_an_earlier_version_tells_nothing_of_its_rounds(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(1, state(1.0))
    manifest = tmp_path / "round-000001" / "manifest.json"
    told = json.loads(manifest.read_text())
    del told["history"]
    manifest.write_text(json.dumps(told))
    latest = latest_of(folder)
    assert latest.history == History()
    assert latest.history.state_rounds(["b", "a"], 9) == (9, 9)


def flip_a_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [flip_a_bit, cut_off])
def test_a_damaged_one_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(1, state(1.0))
    folder.save(2, state(2.0))
    tensors = tmp_path / "round-000002" / "state.safetensors"
    tensors.write_bytes(damage(tensors.read_bytes()))
    with caplog.at_level(logging.WARNING):
        latest = latest_of(folder)
    assert latest.server_round == 1
    assert "damaged" in caplog.text


def test_nothing_but_damaged_ones_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "abc")
    folder.save(1, state(1.0))
    (tmp_path / "round-000001" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        folder.load_latest(ModelState)


def test_one_of_another_experiment_is_refused(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, "abc").save(1, state(1.0))
    with pytest.raises(CheckpointError, match="belongs to another experiment"):
        CheckpointFolder(tmp_path, "xyz").load_latest(ModelState)


def test_a_draft_that_a_kill_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".abc.draft").mkdir()
    folder = CheckpointFolder(tmp_path, "abc")
    assert folder.load_latest(ModelState) is None
    folder.save(1, state(1.0))
    manifest = json.loads((tmp_path / "round-000001" / "manifest.json").read_text())
    assert manifest["server_round"] == 1
    assert manifest["fingerprint"] == fingerprint(state(1.0))
