import os
from pathlib import Path

import pytest

from knnper.client.flower_node import holder, is_locked, locked
from knnper.errors import RunError


def test_a_folder_has_one_node(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    with locked(state):
        holder = rf"in use by another `knnper fed client` \(process {os.getpid()}\)"
        with pytest.raises(RunError, match=holder), locked(state):
            pass
    with locked(state):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with (
        pytest.raises(RunError, match="state cannot be written"),
        locked(tmp_path / "state"),
    ):
        pass


def test_who_holds_a_folder_can_be_asked(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
