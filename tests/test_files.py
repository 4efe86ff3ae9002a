"""Files that are whole at any time, and folders that are their owner's alone."""

import errno
import os
import stat
from pathlib import Path

import pytest

from knnper.client.activation import lock_state
from knnper.client.site_state import SiteState
from knnper.errors import RunError
from knnper.files import (
    MOST_NESTED,
    JsonLines,
    draft_of,
    is_private,
    make_private,
    parse_json,
    write_atomically,
)


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


@pytest.mark.parametrize("begin", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [MOST_NESTED + 1, 500, 100_000])
def test_parse_json_refuses_deep_nesting(begin: str, levels: int) -> None:
    end = "]" if begin == "[" else "}"
    text = levels * begin + "[]" + levels * end
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        parse_json(text)


def test_parse_json_reads_what_is_not_nested_too_deeply() -> None:
    value = parse_json(f'{{"a": {98 * "["}1, 2{98 * "]"}, "b": [{{}}]}}')
    for _ in range(97):
        (value["a"],) = value["a"]
    assert value == {"a": [1, 2], "b": [{}]}
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("[")


def test_json_lines_refuse_a_line_that_is_nested_too_deeply(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.path.write_text(f'{{}}\n{{"a": {5000 * "["}{5000 * "]"}}}\n')
    with pytest.raises(RunError, match=r"line 2 of .* is damaged"):
        lines.read()


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_whatever_makes_a_state_folder_makes_it_private(tmp_path: Path) -> None:
    make_private(tmp_path / "above" / "state")
    assert mode(tmp_path / "above" / "state") == 0o700
    SiteState(tmp_path / "site_state", "site-a")
    with lock_state(tmp_path / "node"):
        pass
    assert mode(tmp_path / "site_state") == mode(tmp_path / "node") == 0o700


def test_a_folder_that_is_there_is_closed_unless_it_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    owner = folder.stat().st_uid
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: owner + 1)
        make_private(folder)
    assert mode(folder) == 0o755
    assert not is_private(folder)
    for _ in range(2):
        make_private(folder)
        assert mode(folder) == 0o700
    assert caplog.text.count("could be looked into by other users (mode 0755)") == 1
