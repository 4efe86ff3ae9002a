"""Processes of a server that end, and what a run leaves behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.server.link.peers import Peer, peer
from tests.server.link.running_server import (
    MessageRun,
    RunningServer,
    running_server,
    submitted,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("fed"), ("site-a",)) as opened:
        yield opened


@pytest.fixture
def client(server: RunningServer) -> Iterator[Peer]:
    folder = server.folder.client("site-a")
    with peer(server.gateway, folder / "ca.crt", folder / "site-a.key") as opened:
        wait_until(lambda: server.statuses["site-a"] != "online", timeout_s=90)
        opened.activate()
        yield opened
        opened.deactivate()


def completes(server: RunningServer, client: Peer, folder: Path) -> MessageRun:
    """See that a run that is submitted now begins and ends."""
    run = submitted(server, folder, [client.node_id], size=3_000_000)
    client.answer()
    assert run.finished() == "finished completed"
    return run


def test_server_ends_with_an_error_when_the_superlink_is_killed(
    tmp_path: Path,
) -> None:
    with running_server(tmp_path / "fed", ("site-a",)) as server:
        os.kill(server.commands.the_process("flower-superlink"), signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "SuperLink ended with status -9" in server.printed
        wait_until(lambda: not server.commands.processes())
        again = server.again()
        folder = server.folder.client("site-a")
        with peer(server.gateway, folder / "ca.crt", folder / "site-a.key") as client:
            client.activate()
            completes(server, client, tmp_path / "next")
            client.deactivate()
        assert again.stop() == 0


def test_no_process_but_ours_starts_runs(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    """The stock flower-superexec, once killed, was never there again."""
    assert not server.commands.processes("superexec")
    run = submitted(server, tmp_path / "held", [client.node_id])
    client.receive()
    app = server.commands.the_process("flwr-serverapp")
    os.kill(app, signal.SIGKILL)
    wait_until(lambda: f"run {run.run_id} ended with status -9" in server.printed)
    completes(server, client, tmp_path / "next")
    assert run.finished(120) == "finished failed"


def test_no_secret_is_in_a_command_line(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.update(server.commands.processes().values())
            time.sleep(0.005)

    looking = threading.Thread(target=look)
    looking.start()
    run = submitted(server, tmp_path / "run", [client.node_id])
    client.receive()
    app = server.commands.the_process("flwr-serverapp")
    command = Path(f"/proc/{app}/cmdline").read_text().split("\0")
    token_file = command[command.index("--token-file") + 1]
    token = Path(token_file.replace("self", str(app))).read_text()
    done.set()
    looking.join()
    assert len(token) > 20
    assert any("flwr-serverapp" in command for command in seen)
    assert not [command for command in seen if token in command]
    server.flwr(server.settings.flower_home, "stop", str(run.run_id), "federation")


def test_messages_of_finished_runs_take_no_room(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    state = server.settings.state

    def size() -> int:
        return sum(file.stat().st_size for file in state.glob("superlink.db*"))

    sizes = []
    for number in range(3):
        wait_until(lambda: not server.commands.processes("flwr-serverapp"))
        folder = tmp_path / str(number)
        run = submitted(server, folder, [client.node_id], size=5_000_000, seconds=600)
        client.receive()
        before = size()
        # 20 MB that are never fetched.
        wait_until(lambda: size() > 20e6)
        time.sleep(2.0)
        os.kill(server.commands.the_process("flwr-serverapp"), signal.SIGKILL)
        assert run.finished(120) == "finished failed"
        time.sleep(12.0)  # Flower is asked every 5 s to delete them
        sizes.append((before, size()))
    assert sizes[2][1] < 1.3 * sizes[0][1], sizes
