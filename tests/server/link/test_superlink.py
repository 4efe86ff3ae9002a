import asyncio
import os
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link import superlink
from knnper.server.link.setup import keep_to_owner
from knnper.server.link.superlink import SuperLink, raise_descriptor_limit
from knnper.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = (folder, *folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


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


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0])
    )
    raise_descriptor_limit()
    assert limits == [1024, 1024]


def test_output_of_processes_goes_to_a_log_that_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "_LOG_BYTES", 1000)
    link = SuperLink(ServerSettings(state=tmp_path), tmp_path / "server.yaml")

    async def write() -> None:
        for number in range(6):
            code = f"print('{number}' * 500)"
            process = await link.spawn(sys.executable, "-c", code)
            assert await process.wait() == 0
            await link.stop()

    asyncio.run(write())
    files = ("superlink.log", "superlink.log.1", "superlink.log.2", "superlink.log.3")
    texts = [(tmp_path / name).read_text() for name in files]
    assert [set(text) for text in texts] == [{str(n), "\n"} for n in (5, 4, 3, 2)]
    assert not (tmp_path / "superlink.log.4").exists()
