"""Which way models travel."""

from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.experiment import RunSettings
from knnper.simulation.flower_engine import carrier_folder
from knnper.transport import messages as shared_memory


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY_FILE_SYSTEM", tmp_path)


@pytest.mark.parametrize(
    ("run", "in_memory"),
    [
        (RunSettings(), True),
        (RunSettings(carrier="shared_memory"), True),
        (RunSettings(carrier="message"), False),
        (RunSettings(ray_address="10.0.0.1:6379"), False),
        (RunSettings(ray_address="auto", carrier="shared_memory"), True),
    ],
)
def test_files_in_memory_stay_on_one_machine(run: RunSettings, in_memory: bool) -> None:
    with carrier_folder(run) as folder:
        assert (folder is not None) == in_memory


def test_without_room_auto_sends_messages_and_shared_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "LEAST_FREE_BYTES", 2**62)
    with carrier_folder(RunSettings()) as folder:
        assert folder is None
    with pytest.raises(RunError, match="--shm-size"):
        carrier_folder(RunSettings(carrier="shared_memory"))
