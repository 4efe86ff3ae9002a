"""What a worker checks before it plays clients."""

from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.simulation.flower_engine import SESSION_FILE, require_same_folder


def test_the_folder_that_the_server_wrote_to(tmp_path: Path) -> None:
    (tmp_path / SESSION_FILE).write_text("abc")
    require_same_folder(tmp_path, "abc")


@pytest.mark.parametrize("written", [None, "another run"])
def test_a_folder_of_the_same_name_on_another_disk(
    tmp_path: Path, written: str | None
) -> None:
    if written is not None:
        (tmp_path / SESSION_FILE).write_text(written)
    with pytest.raises(RunError, match="give --output on a file system that all"):
        require_same_folder(tmp_path, "abc")
