"""Folders that hold a site's examples are their owner's alone."""

import stat
from pathlib import Path

import pytest

from knnper.client.flower_node import locked
from knnper.client.install import SiteState
from knnper.files import is_private, make_private


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    make_private(tmp_path / "above" / "state")
    assert mode(tmp_path / "above" / "state") == 0o700


def test_a_folder_that_is_there_is_closed_and_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    assert not is_private(folder)
    make_private(folder)
    assert mode(folder) == 0o700
    make_private(folder)
    assert caplog.text.count("could be looked into by other users (mode 0755)") == 1


def test_the_folder_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    make_private(folder)
    assert mode(folder) == 0o755


def test_whatever_makes_a_state_folder_makes_it_private(tmp_path: Path) -> None:
    SiteState(tmp_path / "site_state", "site-a")
    with locked(tmp_path / "node"):
        pass
    assert mode(tmp_path / "site_state") == mode(tmp_path / "node") == 0o700
