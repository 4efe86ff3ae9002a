import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.node.real_processes import (
    Link,
    client,
    link_running,
    new_client,
    runner_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc").exists(), reason="looks at processes in /proc"
    ),
]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with link_running(tmp_path_factory.mktemp("link")) as one:
        yield one


@pytest.fixture
def config(link: Link, tmp_path: Path) -> Path:
    path = new_client(tmp_path / "site-a", link)
    link.register(path.with_name("client.key"), f"site-{time.time_ns()}")
    return path


def test_life_of_a_client(link: Link, config: Path, tmp_path: Path) -> None:
    with client(config) as first:
        first.wait_until_in()
        with client(config) as second:
            assert second.wait() == 1
            holder = (
                f"in use by another `knnper fed client` (process {first.process.pid})"
            )
            assert holder in second.written
        elsewhere = new_client(
            tmp_path / "site-b", link, config.with_name("client.key")
        )
        with client(elsewhere, "--patience", "0") as third:
            assert third.wait() == 1
            assert "a node with this key is online" in third.written
        runner = runner_of(first.process.pid)
        first.process.kill()
        first.wait()
        _wait_until_gone(runner)
    with client(config) as again:
        again.wait_for("did not leave in order the last time")
        again.wait_until_in()
        runner = runner_of(again.process.pid)
        began = time.monotonic()
        again.process.send_signal(signal.SIGTERM)
        assert again.wait() == 0
        assert time.monotonic() - began < 5  # alone on a machine: less than 1
        _wait_until_gone(runner)
    with client(config, "--patience", "0") as after_an_orderly_end:
        after_an_orderly_end.wait_until_in()


def _wait_until_gone(process: int) -> None:
    end = time.monotonic() + 5
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end, f"process {process} lives on"
        time.sleep(0.01)
