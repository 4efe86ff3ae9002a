import logging
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link.setup import keep_to_owner
from knnper.server.link.superlink import LogFile, allow_descriptors


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = (folder, *folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


def test_a_state_folder_is_its_owners(tmp_path: Path) -> None:
    keep_to_owner(tmp_path / "state")
    (tmp_path / "state" / "runs").mkdir()
    (tmp_path / "state" / "superlink.db").write_text("keys")
    expected = {"state": 0o700, "runs": 0o700, "superlink.db": 0o600}
    assert modes(tmp_path / "state") == expected


def test_an_open_state_folder_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    (state / "runs").mkdir(parents=True)
    (state / "superlink.db").write_text("keys")
    (state / "program").write_text("run")
    (state / "program").chmod(0o755)
    outside = tmp_path / "outside"
    outside.write_text("others'")
    (state / "link").symlink_to(outside)
    keep_to_owner(state)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    (state / "link").unlink()
    expected = {"state": 0o700, "runs": 0o700, "superlink.db": 0o600, "program": 0o700}
    assert modes(state) == expected
    assert "get at 4 files and folders" in caplog.text
    caplog.clear()
    keep_to_owner(state)
    assert caplog.text == ""


def test_a_log_is_read_on_by_whole_lines(tmp_path: Path) -> None:
    log, position = LogFile(tmp_path / "warnings.log", largest=20), 0
    assert log.read_from(position) == ([], 0)
    steps = {"one\ntw": ["one"], "o\n": ["two"], "": [], "é\n\nx\n": ["é", "", "x"]}
    for text, expected in steps.items():
        with log.path.open("a") as writer:
            writer.write(text)
        lines, position = log.read_from(position)
        assert lines == expected
    with log.path.open("a") as writer:
        writer.write("a line too many\n")
    log.put_aside()
    log.path.write_text("anew\n")
    assert log.read_from(position) == (["anew"], 5)


def test_a_log_is_put_aside_while_it_is_written(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "superlink.log", largest=10, num_kept=2)
    log.put_aside()
    with log.path.open("ab", buffering=0) as writer:
        for text in (b"first line", b", longer", b"second line", b"third line!"):
            writer.write(text)
            log.put_aside()
        writer.write(b"last")
    parts = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert parts == {
        "superlink.log": b"last",
        "superlink.log.1": b"third line!",
        "superlink.log.2": b"second line",
    }


def test_too_few_descriptors_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0])
    )
    with caplog.at_level(logging.WARNING):
        allow_descriptors(1000)
        assert (limits[0], caplog.text) == (1024, "")
        allow_descriptors(4100)
    assert "may have 1024 files and connections open" in caplog.text
