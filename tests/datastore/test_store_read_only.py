"""A store on a file system that cannot be written: a process sees it mounted so."""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from knnper.datastore.examples import StoreDamagedError, StoreError
from knnper.datastore.store import DATABASE, open_store
from knnper.datastore.transfer import export_store, summarize
from knnper.datastore.verify import verify
from tests.datastore.damaged_store import left_by_a_kill, log_in
from tests.datastore.small_store import forked, small_store, some

Work = Callable[[Path], Iterator[object]]
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 1, 32, 4096, 16384 | 1 << 18


def _make_read_only(folder: Path) -> bool:
    """Keep this process from writing in ``folder``; return whether that worked."""
    system = ctypes.CDLL(None)
    # Whoever is not root may do so as another user.
    if all(system.unshare(one) for one in (_NEW_MOUNTS, _NEW_MOUNTS | _NEW_USER)):
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


def test_it_is_read_by_a_user_who_may_not_write() -> None:
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
