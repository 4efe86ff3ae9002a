"""Links that lead nowhere, folders without permission, files that systems make."""

import os
from pathlib import Path

import pytest

from knnper.data.folders import folders_in, is_folder, list_folder, no_folder_reason
from knnper.errors import DataError

CLUTTER = (
    *("Thumbs.db", "desktop.ini", "Desktop.ini", ".DS_Store", "._cat.png"),
    *("__MACOSX", "@eaDir", ".ipynb_checkpoints", "lost+found", "$RECYCLE.BIN"),
    *("System Volume Information", "#recycle", "Icon\r"),
)


def put_clutter(root: Path) -> None:
    """Put what systems leave into ``root`` and every folder below it."""
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        for name in CLUTTER:
            if "." in name or "\r" in name:
                (folder / name).write_bytes(b"\0")
            else:
                (folder / name).mkdir()
                (folder / name / "x.png").write_bytes(b"\0")


def test_clutter_is_left_out(tmp_path: Path) -> None:
    put_clutter(tmp_path)
    for name in ("cat", "data.db", "macosx"):
        (tmp_path / name).mkdir()
    assert [entry.name for entry in list_folder(tmp_path)] == [
        "cat",
        "data.db",
        "macosx",
    ]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("/mnt/not-mounted/owl", "link to /mnt/not-mounted/owl, which cannot be fol"),
        ("owl", "is a link to owl, which .*: Too many levels of symbolic links"),
    ],
)
def test_broken_links_are_refused(tmp_path: Path, target: str, reason: str) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").symlink_to(tmp_path / "cat")
    assert folders_in(tmp_path) == ["cat", "dog"]
    (tmp_path / "owl").symlink_to(target)
    assert [is_folder(entry) for entry in list_folder(tmp_path)] == [True, True, False]
    with pytest.raises(DataError, match=rf"owl .*{reason}"):
        folders_in(tmp_path)
    with pytest.raises(DataError, match=rf"owl .*{reason}"):
        list_folder(tmp_path / "owl")
    assert no_folder_reason(tmp_path / "owl")


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "owl")
    with pytest.raises(DataError, match="owl is neither a file nor a folder"):
        folders_in(tmp_path)


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A superuser, which tests may run as, may list every folder.
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(
        DataError, match="cannot be listed: Permission denied; expected"
    ):
        list_folder(tmp_path)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert no_folder_reason(tmp_path) is None
    assert no_folder_reason(tmp_path / "file") == "is not a folder"
    assert no_folder_reason(tmp_path / "nothing") == "does not exist"
    reason = no_folder_reason(tmp_path / "file" / "below")
    assert reason == "cannot be reached: Not a directory"
