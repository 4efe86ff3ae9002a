import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from knnper.errors import CodecError
from knnper.records import fingerprint
from knnper.strategies.core.records import ModelPayload
from knnper.transport import shared_memory
from knnper.transport.messages import (
    IN_MESSAGE,
    CannotRunError,
    Files,
    Introduction,
    pack,
    read_introduction,
    unpack,
    unpack_shared,
    why_none_can_run,
)

PAYLOAD = ModelPayload(torch.linspace(-1, 1, 1000))


def test_arrays_travel_as_a_file_in_memory(tmp_path: Path) -> None:
    files = Files(tmp_path, least_bytes=0)
    packed = pack(PAYLOAD, files)
    assert len(packed.array) == 0
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [4000]
    assert fingerprint(unpack(ModelPayload, packed, files)) == fingerprint(PAYLOAD)
    files.discard(packed)
    with pytest.raises(CodecError, match="is not on this machine"):
        unpack(ModelPayload, packed, files)
    pack(PAYLOAD, files)
    assert len(list(tmp_path.iterdir())) == 1, "what was given back is used again"
    # They stay in the message where memory is full.
    packed = pack(PAYLOAD, Files(tmp_path / "no-such-folder", least_bytes=0))
    assert fingerprint(unpack(ModelPayload, packed)) == fingerprint(PAYLOAD)


def test_what_is_shared_is_read_once(tmp_path: Path) -> None:
    files = Files(tmp_path, least_bytes=0)
    packed = pack(PAYLOAD, files)
    first = unpack_shared(ModelPayload, packed, files)
    files.discard(packed)
    assert unpack_shared(ModelPayload, packed, files) is first
    assert fingerprint(first) == fingerprint(PAYLOAD)
    again = pack(PAYLOAD, files)
    assert unpack_shared(ModelPayload, again, files) is not first
    inside = unpack_shared(ModelPayload, pack(PAYLOAD), IN_MESSAGE)
    assert fingerprint(inside) == fingerprint(PAYLOAD)


def test_what_is_wrong_with_a_process_is_found_in_what_flower_tells() -> None:
    error = CannotRunError("there is no data in /data")
    told = f"<class 'ClientAppException'>:<'Traceback ...\n{error!r}\nKnn: {error}'>"
    reason = why_none_can_run(told)
    assert reason is not None
    assert reason.startswith("no client can be run on ")
    assert reason.endswith(": there is no data in /data")
    assert why_none_can_run("the client's weights are not finite") is None


def read(**fields: Any) -> Introduction:
    return read_introduction(RecordDict({"introduction": ConfigRecord(fields)}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "../x"},
        {"name": "a" * 256},
        {"name": "a\n"},
        {"name": 7},
        {"name": "a", "num_train": b"5"},
        {"name": "a", "num_test": -1},
        {"name": "a", "num_test": 2**53 + 1},
        {"name": "a", "num_validation": True},
        {"name": "a", "train": 1},
        {"name": "a", "more": 1},
    ],
)
def test_what_cannot_be_is_a_problem(fields: dict[str, Any]) -> None:
    said = read(**fields)
    assert (said.name, said.num_train) == ("", 0)
    assert said.problem


def test_a_problem_is_one_short_line() -> None:
    said = read(name="a", problem="x\n2026 INFO run finished" + "y" * 999)
    assert said.problem.startswith("x\\n2026 INFO")
    assert len(said.problem) == 500


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "MEMORY_FILE_SYSTEM", tmp_path)
    return tmp_path


def test_what_a_killed_run_left_is_removed_and_no_neighbours(memory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (memory / f"knnper-{ended.pid}-abc").mkdir()
    neighbour = memory / "knnper-1-abc"
    neighbour.mkdir()
    with shared_memory.shared_folder() as folder:
        assert {*memory.iterdir()} == {folder, neighbour}
    assert list(memory.iterdir()) == [neighbour]


@pytest.mark.parametrize(
    ("name", "value"),
    [("MEMORY_FILE_SYSTEM", Path("/missing")), ("LEAST_FREE_BYTES", 2**62)],
)
def test_no_room_in_memory_is_no_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(shared_memory, name, value)
    with shared_memory.shared_folder() as folder:
        assert folder is None


def written(memory: Path, vector: torch.Tensor) -> Path:
    path = shared_memory.write_vector(memory, vector)
    assert path is not None
    return path


def test_a_file_is_written_again_under_another_name(memory: Path) -> None:
    first = written(memory, torch.zeros(3))
    shared_memory.recycle(first)
    inode = next(memory.iterdir()).stat().st_ino
    second = written(memory, torch.ones(3))
    assert (second != first, second.stat().st_ino) == (True, inode)
    shared_memory.recycle(first)  # too late: it is somebody else's now
    assert shared_memory.read_vector(second).tolist() == [1.0, 1.0, 1.0]


def test_a_file_of_another_size_is_left_alone(memory: Path) -> None:
    shared_memory.recycle(written(memory, torch.zeros(3)))
    large = written(memory, torch.ones(4))
    assert shared_memory.read_vector(large).tolist() == [1.0] * 4
    assert len(list(memory.iterdir())) == 2
