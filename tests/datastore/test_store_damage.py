import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.connection import PAGE_BYTES
from knnper.datastore.examples import StoreDamagedError, StoreError
from knnper.datastore.journal import ACKNOWLEDGED
from knnper.datastore.store import DATABASE, INDEX, LOCK, Store, open_store
from knnper.datastore.transfer import export_store, summarize
from knnper.datastore.verify import verify
from tests.datastore.damaged_store import (
    FRAME,
    a_history,
    left_by_a_kill,
    log_in,
    rows_of,
    write_flipped,
)
from tests.datastore.small_store import forked, small_store, some


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store whose log ends with frames of an older log."""
    return left_by_a_kill(tmp_path_factory.mktemp("killed") / "store", a_history)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that was closed as it should be."""
    folder = tmp_path_factory.mktemp("closed") / "store"
    small_store(folder, count=300).close()
    return folder


@pytest.fixture
def store(killed: Path, tmp_path: Path) -> Path:
    """Return a store that may be damaged."""
    shutil.copytree(killed, tmp_path / "store")
    return tmp_path / "store"


FLIPS = [
    ("killed", f"{DATABASE}-wal", 600),
    ("closed", DATABASE, 800),
    ("closed", ACKNOWLEDGED, 100),
]


@pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "name", "num_flips"), FLIPS)
def test_no_flipped_bit_is_silent(
    request: pytest.FixtureRequest, kind: str, name: str, num_flips: int, share: int
) -> None:
    folder: Path = request.getfixturevalue(kind)
    copy, expected = folder.with_name("flipped"), rows_of(folder)
    content = (folder / name).read_bytes()
    generator = np.random.default_rng(num_flips // share)
    num_refused = 0
    for number in range(num_flips // share):
        # Of a database every other one in its first page.
        most = PAGE_BYTES if name == DATABASE and number % 2 else len(content)
        bit = int(generator.integers(0, 8 * most))
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        write_flipped(copy / name, content, bit)
        is_found = bool(verify(copy).findings)
        try:
            assert rows_of(copy) == expected, f"bit {bit} is silent"
        except StoreDamagedError:
            assert is_found, f"bit {bit} is not found"
            num_refused += 1
    assert num_refused


@pytest.fixture
def unfinished(store: Path, tmp_path: Path) -> tuple[Path, bytes, int]:
    """Return a store, its log with another transaction, and where that begins."""
    later = shutil.copytree(store, tmp_path / "later")
    # Whoever writes next begins a new log: both states must be of the same one.
    shutil.rmtree(store)

    def work(writer: Store) -> None:
        writer.add(some(2, 50, "before"))
        shutil.copytree(later, store)
        writer.add(some(600, 51, "last"))

    left_by_a_kill(later, work)
    before, content = log_in(store).read_bytes(), log_in(later).read_bytes()
    assert content.startswith(before)
    assert len(content) > len(before)
    return store, content, len(before)


Unfinished = tuple[Path, bytes, int]


def test_a_transaction_that_was_cut_short_is_no_damage(unfinished: Unfinished) -> None:
    folder, content, begin = unfinished
    expected = rows_of(folder)
    for end in range(begin, len(content), FRAME // 2 + 5):
        log_in(folder).write_bytes(content[:end])
        assert rows_of(folder) == expected
        assert verify(folder).findings == ()
    # A power cut may keep its end, and lose its beginning.
    holey = content[: begin + 100] + bytes(FRAME) + content[begin + 100 + FRAME :]
    log_in(folder).write_bytes(holey)
    assert rows_of(folder) == expected
    with open_store(folder, writable=True) as store:
        store.add(some(1, 60, "next"))
    assert verify(folder).findings == ()


def _read_on(folder: Path, pipe: Connection) -> None:
    with open_store(folder) as reader, reader._rows.reading():
        pipe.send(len(reader._rows.contents()))
        pipe.recv()


def test_writer_continues_after_a_torn_transaction(unfinished: Unfinished) -> None:
    folder, content, begin = unfinished
    torn = content[:begin] + bytes(FRAME) + content[begin + FRAME :]
    log_in(folder).write_bytes(torn)
    # So that the log cannot be emptied.
    reader, parent_end = forked(_read_on, folder)
    count = parent_end.recv()
    left_by_a_kill(folder, lambda store: store.add(some(1, 60, "next")))
    parent_end.send("end")
    reader.join()
    with open_store(folder) as store:
        assert len(store) == count + 1


def test_the_last_acknowledged_transaction_cannot_be_cut(
    unfinished: Unfinished, tmp_path: Path
) -> None:
    folder, content, begin = unfinished
    shutil.copy(tmp_path / "later" / ACKNOWLEDGED, folder)
    for end in (begin, begin + 100, len(content) - 1):
        log_in(folder).write_bytes(content[:end])
        with pytest.raises(StoreDamagedError, match="acknowledged"):
            open_store(folder)
    log_in(folder).write_bytes(content)
    open_store(folder).close()


def harm(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if damage == "made a folder":
        path.mkdir()
    elif damage != "removed":
        left = {"empty": b"", "halved": content[: len(content) // 2]}
        path.write_bytes(left.get(damage, b"[" * 5000))


HARMS = ["removed", "empty", "halved", "scribbled on", "made a folder"]


@pytest.mark.parametrize("damage", HARMS)
@pytest.mark.parametrize("name", [DATABASE, f"{DATABASE}-wal", ACKNOWLEDGED])
def test_a_file_that_is_no_more_what_it_was_is_refused(
    store: Path, name: str, damage: str
) -> None:
    harm(store / name, damage)
    files = {path: path.read_bytes() for path in store.iterdir() if path.is_file()}
    for writable in (False, True):
        with pytest.raises(StoreError) as caught:
            open_store(store, writable=writable)  # type: ignore[call-overload]
        # A store without its database is none.
        is_damaged = isinstance(caught.value, StoreDamagedError)
        assert is_damaged or not (store / DATABASE).is_file()
    if (store / DATABASE).is_file():
        assert verify(store).findings
    for path, content in files.items():
        if path.suffix not in (".lock", ".sqlite3-shm"):
            assert path.read_bytes() == content, path


def test_a_witness_without_its_end_is_refused_whatever_it_says(store: Path) -> None:
    path = store / ACKNOWLEDGED
    content = path.read_bytes()
    for end in (len(content.rstrip()), len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(StoreDamagedError, match="missing or damaged"):
            open_store(store)
    path.write_bytes(content)
    open_store(store).close()


@pytest.mark.parametrize("damage", HARMS)
@pytest.mark.parametrize("pattern", ["manifest.json", "*.index"])
def test_a_saved_index_is_not_needed(
    closed: Path, tmp_path: Path, pattern: str, damage: str
) -> None:
    folder = Path(shutil.copytree(closed, tmp_path / "store"))
    (file,) = (folder / INDEX).glob(pattern)
    harm(file, damage)
    assert rows_of(folder) == rows_of(closed)
    # None that is saved is no fault.
    assert bool(verify(folder).findings) == (damage != "removed")
    with open_store(folder, writable=True) as store:
        store.compact()
    if damage != "made a folder":
        assert verify(folder).findings == ()


def test_too_many_open_files_are_no_damage(store: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = []
    with (store / LOCK).open("rb") as file:
        for more in range(10):
            limit = (file.fileno() + 1 + more, limits[1])
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            try:
                open_store(store).close()
            except StoreError as error:
                refused.append(type(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(refused) == {StoreError}


Work = Callable[[Path], Iterator[object]]
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 1, 32, 4096, 16384 | 1 << 18


def _make_read_only(folder: Path) -> bool:
    """Keep this process from writing in ``folder``; return whether that worked."""
    system = ctypes.CDLL(None)
    # Whoever is not root may do so as another user.
    if all(system.unshare(flags) for flags in (_NEW_MOUNTS, _NEW_MOUNTS | _NEW_USER)):
        return False
    path = os.fsencode(folder)
    mounts = [
        (b"none", b"/", _PRIVATE),
        (path, path, _BIND),
        (b"none", path, _REMOUNT | _BIND | _READ_ONLY),
    ]
    done = [system.mount(one, to, None, flags, None) for one, to, flags in mounts]
    return not any(done) and not os.access(folder, os.W_OK)


def _lose_the_right_to_write(folder: Path) -> bool:
    """Become a user who may only read ``folder``."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setuid(65534)
    else:
        folder.chmod(0o555)
    return not os.access(folder, os.W_OK)


def _answer(
    folder: Path, work: Work, bar: Callable[[Path], bool], pipe: Connection
) -> None:
    pipe.send(bar(folder))
    answers = work(folder)
    while pipe.recv():
        pipe.send(next(answers))


class _Reader:
    """A process that cannot write in a folder, and does a part of its work if asked."""

    def __init__(
        self, folder: Path, work: Work, bar: Callable[[Path], bool] = _make_read_only
    ) -> None:
        self._process, self._pipe = forked(_answer, folder, work, bar)
        if not self._pipe.recv():
            self._process.kill()
            pytest.skip("NOT TESTED: a folder cannot be made read-only here")

    def asked(self) -> object:
        self._pipe.send(True)
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(False)
        self._process.join()
        assert self._process.exitcode == 0


def _read(folder: Path) -> Iterator[object]:
    with open_store(folder) as store:
        ids = store.contents().ids
        yield len(ids), store.search(store.vectors(ids[:3]), 1).ids[:, 0].tolist()
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(folder, writable=True)
    yield verify(folder).findings
    yield summarize(folder).num_examples
    yield export_store(folder, folder.with_name("out.npz"))


@pytest.mark.parametrize("num_logged", [0, 5])
def test_it_is_read_with_and_without_a_log(tmp_path: Path, num_logged: int) -> None:
    folder = tmp_path / "store"
    small_store(folder).close()
    if num_logged:
        left_by_a_kill(folder, lambda store: store.add(some(num_logged)))
    assert log_in(folder).exists() == bool(num_logged)
    reader, count = _Reader(folder, _read), 30 + num_logged
    assert reader.asked() == (count, [1, 2, 3])
    assert reader.asked() == ()
    assert [reader.asked(), reader.asked()] == [count, count]
    reader.end()


def _count(folder: Path) -> Iterator[object]:
    with open_store(folder) as store:
        while True:
            yield len(store)


def test_store_is_readable_without_write_permission() -> None:
    # Nobody else may look into pytest's own folders.
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        small_store(folder).close()
        for path in (folder.parent, folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        reader = _Reader(folder, _count, _lose_the_right_to_write)
        assert reader.asked() == 30
        reader.end()
        folder.chmod(0o755)


def _refused(folder: Path) -> Iterator[object]:
    with pytest.raises(StoreError, match="copy the whole folder") as caught:
        open_store(folder)
    yield isinstance(caught.value, StoreDamagedError)


def test_a_log_that_cannot_be_read_there_is_refused(tmp_path: Path) -> None:
    folder = left_by_a_kill(tmp_path / "store", lambda store: store.add(some(5)))
    (folder / f"{DATABASE}-shm").unlink()
    reader = _Reader(folder, _refused)
    assert reader.asked() is False
    reader.end()


def test_what_is_written_elsewhere_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    small_store(folder).close()
    reader = _Reader(folder, _count)
    assert reader.asked() == 30
    for count in (31, 32):
        with open_store(folder, writable=True) as store:
            assert reader.asked() == count - 1
            store.add(some(1))
            assert reader.asked() == count
        assert reader.asked() == count
    reader.end()
