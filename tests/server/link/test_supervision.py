"""Whatever process of a server ends, it is there again, and the next run works."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link.doctor import server_checks
from knnper.transport.diagnosis import Finding, Verdict, examine
from tests.processes import wait_until
from tests.server.link.peers import Peer, peer
from tests.server.link.running_server import (
    MessageRun,
    RunningServer,
    running_server,
    submitted,
)

pytestmark = pytest.mark.slow
LEFT = ("message_ins", "message_res", "objects", "run_objects", "object_push_sessions")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("fed"), ("site-a",)) as one:
        yield one


@pytest.fixture
def client(server: RunningServer) -> Iterator[Peer]:
    folder = server.folder.client("site-a")
    with peer(server.gateway, folder / "ca.crt", folder / "site-a.key") as one:
        wait_until(lambda: server.statuses["site-a"] != "online", timeout_s=90)
        one.activate()
        yield one
        one.deactivate()


def completes(server: RunningServer, client: Peer, folder: Path) -> MessageRun:
    """See that a run that is submitted now begins and ends."""
    run = submitted(server, folder, [client.node_id], size=3_000_000)
    client.answer()
    assert run.finished() == "finished completed"
    return run


def looked_at(server: RunningServer) -> dict[str, Finding]:
    return {one.subject: one.finding for one in examine(server_checks(server.settings))}


def test_a_killed_superlink(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    assert looked_at(server)["processes"].verdict is Verdict.OK
    completes(server, client, tmp_path / "first")
    before = server.commands.the_process("flower-superlink")
    os.kill(before, signal.SIGKILL)
    missing = looked_at(server)
    assert missing["processes"].verdict is Verdict.PROBLEM
    assert str(before) in missing["processes"].found
    wait_until(lambda: "runs again" in server.said)
    wait_until(lambda: looked_at(server)["processes"].verdict is Verdict.WARNING)
    assert server.commands.the_process("flower-superlink") != before
    assert server.statuses["site-a"] in ("registered", "offline", "online")
    completes(server, client, tmp_path / "second")


def test_no_process_but_ours_starts_runs(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    """The stock flower-superexec, once killed, was never there again."""
    assert not server.commands.processes("superexec")
    run = submitted(server, tmp_path / "held", [client.node_id])
    client.receive()
    app = server.commands.the_process("flwr-serverapp")
    os.kill(app, signal.SIGKILL)
    wait_until(lambda: f"run {run.run_id} ended with status -9" in server.said)
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
    database = sqlite3.connect(server.settings.state / "superlink.db")
    tokens = [
        token
        for (token,) in database.execute("SELECT token FROM task")
        if token is not None
    ]
    database.close()
    done.set()
    looking.join()
    assert len(tokens) == 1
    assert any("flwr-serverapp" in command for command in seen)
    assert not [one for one in seen for token in tokens if token in one]
    server.flwr(server.settings.flower_home, "stop", str(run.run_id), "federation")


def test_nothing_is_left_of_a_finished_run(
    server: RunningServer, client: Peer, tmp_path: Path
) -> None:
    state = server.settings.state
    file = state / "superlink.db"
    # That of a run that was stopped takes a moment to end.
    wait_until(lambda: not server.commands.processes("flwr-serverapp"))
    run = submitted(server, tmp_path / "run", [client.node_id], size=5_000_000)
    client.receive()
    # 20 MB that are never fetched.
    wal = Path(f"{file}-wal")
    wait_until(lambda: file.stat().st_size + wal.stat().st_size > 20e6)
    app = server.commands.the_process("flwr-serverapp")
    os.kill(app, signal.SIGKILL)
    # Nobody lists the run, nor reads its log: Flower would leave it all.
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)

    def num_left() -> int:
        counted = (f"SELECT count(*) FROM {table}" for table in LEFT)
        return sum(database.execute(one).fetchone()[0] for one in counted)

    assert num_left() > 0
    wait_until(lambda: num_left() == 0, timeout_s=150)
    database.close()
    wait_until(lambda: file.stat().st_size < 2e6, timeout_s=30)
    wait_until(lambda: wal.stat().st_size < 2e6, timeout_s=30)
    assert run.state == "finished failed"
