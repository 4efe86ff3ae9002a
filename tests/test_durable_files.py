"""Files that are whole at any time: what a failing write leaves."""

import errno
import os
from pathlib import Path

import pytest

from knnper.files import JsonLines, draft_of, write_atomically


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_leaves_the_old_content_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_a_draft_that_cannot_be_removed_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    draft_of(path).mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, "new")


def test_the_draft_of_a_kill_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    draft_of(path).write_text("torn and longer than what follows")
    write_atomically(path, b"whole")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [
        ("x.json", "whole")
    ]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"a": 1})
    with lines.path.open("a") as file:
        file.write('{"a": ')
    assert lines.read() == [{"a": 1}]
    lines.append({"a": 2})
    assert lines.read() == [{"a": 1}, {"a": 2}]
