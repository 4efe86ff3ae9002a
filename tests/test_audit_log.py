"""The chain of an audit log: tampering, kills, and several processes."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from knnper.audit_log import AUDIT_LOG, NO_HASH, AuditLog, AuditLogError
from knnper.files import is_private

ROOT = Path(__file__).parents[1]
NUM_ENTRIES = 5
# Appends until it is killed; writes each number once the entry is on disk.
WRITER = """
import itertools, sys
from pathlib import Path
from knnper.audit_log import AuditLog

log, name, most = AuditLog(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
for number in range(most):
    log.append("written", by=name, count=number, text=number % 50 * "x")
    print(number, flush=True)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> AuditLog:
    log = AuditLog.of(tmp_path_factory.mktemp("site") / "state")
    for number in range(NUM_ENTRIES):
        log.append("message", run=number, limits={"methods": ("knn_per", "é")})
    return log


@pytest.fixture
def log(tmp_path: Path, written: AuditLog) -> AuditLog:
    """Return a copy: each entry takes milliseconds to get to the disk."""
    shutil.copy(written.path, tmp_path)
    return AuditLog.of(tmp_path)


def lines_of(log: AuditLog) -> list[bytes]:
    return log.path.read_bytes().splitlines(keepends=True)


def head_of(log: AuditLog) -> str:
    *_, last = log.entries()
    return str(last["hash"])


def write(log: AuditLog, lines: Sequence[bytes]) -> None:
    log.path.write_bytes(b"".join(lines))


def hash_of(line: bytes) -> str:
    """Return the hash of a line by its definition: of all but the field ``hash``."""
    entry = json.loads(line)
    del entry["hash"]
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()


def rehashed(line: bytes, **changes: Any) -> bytes:
    """Return a changed line with a hash that fits it."""
    entry = {**json.loads(line), **changes}
    entry["hash"] = hash_of(json.dumps(entry).encode())
    return json.dumps(entry).encode() + b"\n"


def test_each_line_holds_hash_of_line_before(log: AuditLog) -> None:
    previous = NO_HASH
    for number, line in enumerate(lines_of(log), 1):
        entry = json.loads(line)
        assert entry["previous"] == previous
        assert (entry["number"], entry["run"]) == (number, number - 1)
        previous = hash_of(line)
        assert entry["hash"] == previous
    assert [entry["run"] for entry in log.entries()] == [*range(NUM_ENTRIES)]
    assert head_of(log) == previous


def test_log_is_in_folder_of_this_user_alone(written: AuditLog) -> None:
    assert is_private(written.path.parent)


def test_log_without_entries_has_no_head(tmp_path: Path) -> None:
    log = AuditLog.of(tmp_path)
    assert (list(log.entries()), list(log.entries(NO_HASH))) == ([], [])
    with pytest.raises(AuditLogError, match="none of 0 entries"):
        list(log.entries("1" * 64))


def altered(lines: list[bytes], place: int) -> int:
    lines[place] = lines[place].replace(b'"run": ', b'"run": 1', 1)
    return place + 1


def altered_in_white_space(lines: list[bytes], place: int) -> int:
    lines[place] = lines[place].replace(b'"run": ', b'"run":  ', 1)
    return place + 1


def altered_with_new_hash(lines: list[bytes], place: int) -> int:
    lines[place] = rehashed(lines[place], run=77)
    return place + 2  # the line after it holds the former hash


def replaced_by_text(lines: list[bytes], place: int) -> int:
    lines[place] = b"nothing happened\n"
    return place + 1


def emptied(lines: list[bytes], place: int) -> int:
    lines[place] = b"\n"
    return place + 1


def removed(lines: list[bytes], place: int) -> int:
    del lines[place]
    return place + 1


def removed_and_renumbered(lines: list[bytes], place: int) -> int:
    del lines[place]
    for number in range(place, len(lines)):
        lines[number] = rehashed(lines[number], number=number + 1)
    return place + 1


def repeated(lines: list[bytes], place: int) -> int:
    lines.insert(place, lines[place])
    return place + 2


def moved_to_end(lines: list[bytes], place: int) -> int:
    lines.append(lines.pop(place))
    return place + 1


def exchanged(lines: list[bytes], place: int) -> int:
    other = (place + 1) % len(lines)
    lines[place], lines[other] = lines[other], lines[place]
    return min(place, other) + 1


def without_line_end(lines: list[bytes], place: int) -> int:
    lines[place] = lines[place].removesuffix(b"\n")
    return place + 1


TAMPERING: tuple[Callable[[list[bytes], int], int], ...] = (
    altered,
    altered_in_white_space,
    altered_with_new_hash,
    replaced_by_text,
    emptied,
    removed,
    removed_and_renumbered,
    repeated,
    moved_to_end,
    exchanged,
    without_line_end,
)
# At the last line only a noted head reveals these.
ONLY_BY_HEAD = {
    altered_with_new_hash,
    removed,
    removed_and_renumbered,
    moved_to_end,
    without_line_end,
}


@pytest.mark.parametrize("place", range(NUM_ENTRIES))
@pytest.mark.parametrize("tamper", TAMPERING)
def test_verify_names_first_line_that_was_tampered_with(
    log: AuditLog, tamper: Callable[[list[bytes], int], int], place: int
) -> None:
    lines = lines_of(log)
    head = head_of(log)
    number = tamper(lines, place)
    if lines == lines_of(log):  # the last line moved to the end
        return
    write(log, lines)
    if place == NUM_ENTRIES - 1 and tamper in ONLY_BY_HEAD:
        list(log.entries())
        number_pattern = "none of"
    else:
        number_pattern = f"line {number} of .* was changed"
        if tamper in (removed, repeated, moved_to_end, exchanged):
            number_pattern += ".* removed, added or moved"
        with pytest.raises(AuditLogError, match=number_pattern):
            list(log.entries())
    with pytest.raises(AuditLogError, match=number_pattern):
        list(log.entries(head))


def test_noted_head_shows_removed_end_and_rewritten_log(log: AuditLog) -> None:
    heads = [json.loads(line)["hash"] for line in lines_of(log)]
    for head in heads:
        assert len(list(log.entries(head))) == NUM_ENTRIES
    lines = lines_of(log)
    write(log, lines[:3])
    assert len(list(log.entries(heads[2]))) == 3
    for head in heads[3:]:
        with pytest.raises(AuditLogError, match=f"none of 3 .* expected head {head}"):
            list(log.entries(head))
    previous = NO_HASH
    for place, line in enumerate(lines):
        lines[place] = rehashed(line, run=50 + place, previous=previous)
        previous = hash_of(lines[place])
    write(log, lines)
    assert head_of(log) == previous
    with pytest.raises(AuditLogError, match="rewritten"):
        list(log.entries(heads[0]))


def test_append_replaces_line_that_was_cut_off_anywhere(log: AuditLog) -> None:
    *whole, last = lines_of(log)
    for length in range(0, len(last), 23):
        write(log, [*whole, last[:length]])
        assert len(list(log.entries())) == NUM_ENTRIES - 1
        log.append("next")
        *before, entry = log.entries()
        assert (len(before), entry["event"]) == (NUM_ENTRIES - 1, "next")
        assert len(lines_of(log)) == NUM_ENTRIES


def test_long_line_is_continued(log: AuditLog) -> None:
    for size in (1 << 16, 1 << 18):
        log.append("long", text=size * "x")
        log.append("next")
    assert len(list(log.entries())) == NUM_ENTRIES + 4


def test_nothing_is_added_to_damaged_last_line(log: AuditLog) -> None:
    lines = lines_of(log)
    altered(lines, NUM_ENTRIES - 1)
    write(log, lines)
    with pytest.raises(AuditLogError, match="move it elsewhere"):
        log.append("next")
    assert lines_of(log) == lines


def test_threads_and_processes_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / AUDIT_LOG
    processes = [writer(path, f"process-{number}", 25) for number in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    together = Barrier(2)

    def write_in_thread(name: str) -> None:
        for count in range(25):
            together.wait(timeout=60)
            AuditLog(path).append("written", by=name, count=count)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_in_thread, ["thread-0", "thread-1"]))
    for process in processes:
        process.communicate(timeout=60)
    last = list(AuditLog(path).entries())
    assert len(last) == 4 * 25
    for name in ("process-0", "process-1", "thread-0", "thread-1"):
        counts = [entry["count"] for entry in last if entry["by"] == name]
        assert counts == list(range(25))


@pytest.mark.slow
def test_kills_lose_no_entry_that_was_acknowledged(tmp_path: Path) -> None:
    path, rng = tmp_path / AUDIT_LOG, np.random.default_rng(0)
    log = AuditLog(path)
    for number in range(100):
        name = f"life-{number}"
        process = writer(path, name, 100_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        acknowledged = 1 + len(re.findall(r"^\d+$", rest, re.MULTILINE))
        counts = [entry["count"] for entry in log.entries() if entry["by"] == name]
        assert counts == list(range(len(counts)))
        assert len(counts) - acknowledged in (0, 1)
    assert len(list(log.entries())) >= 100


def writer(path: Path, name: str, most: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(most)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
