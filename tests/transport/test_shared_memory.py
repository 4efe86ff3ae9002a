import subprocess
import sys
from pathlib import Path

import pytest
import torch

from knnper.transport import messages as shared_memory


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "MEMORY_FILE_SYSTEM", tmp_path)
    return tmp_path


def test_the_folder_goes_with_the_run(memory: Path) -> None:
    with shared_memory.shared_folder() as folder:
        assert folder is not None
        path = shared_memory.write_vector(folder, torch.tensor([1.0, -2.5]))
        assert path is not None
        assert shared_memory.read_vector(path).tolist() == [1.0, -2.5]
    assert list(memory.iterdir()) == []


def test_what_a_killed_run_left_is_removed(memory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = memory / f"knnper-{ended.pid}-abc"
    left.mkdir()
    with shared_memory.shared_folder() as folder:
        assert list(memory.iterdir()) == [folder]


def test_a_running_neighbour_is_left_alone(memory: Path) -> None:
    neighbour = memory / "knnper-1-abc"
    neighbour.mkdir()
    with shared_memory.shared_folder():
        pass
    assert neighbour.is_dir()


def test_no_memory_file_system_is_no_error(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY_FILE_SYSTEM", memory / "missing")
    with shared_memory.shared_folder() as folder:
        assert folder is None


def test_too_little_room_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LEAST_FREE_BYTES", 2**62)
    with shared_memory.shared_folder() as folder:
        assert folder is None


def test_a_file_is_written_again_under_another_name(memory: Path) -> None:
    first = shared_memory.write_vector(memory, torch.zeros(3))
    assert first is not None
    shared_memory.recycle(first)
    inode = next(memory.iterdir()).stat().st_ino
    second = shared_memory.write_vector(memory, torch.ones(3))
    assert second is not None
    assert (second != first, second.stat().st_ino) == (True, inode)
    shared_memory.recycle(first)  # too late: it is somebody else's now
    assert shared_memory.read_vector(second).tolist() == [1.0, 1.0, 1.0]


def test_a_file_of_another_size_is_left_alone(memory: Path) -> None:
    small = shared_memory.write_vector(memory, torch.zeros(3))
    assert small is not None
    shared_memory.recycle(small)
    large = shared_memory.write_vector(memory, torch.ones(4))
    assert large is not None
    assert shared_memory.read_vector(large).tolist() == [1.0] * 4
    assert len(list(memory.iterdir())) == 2
