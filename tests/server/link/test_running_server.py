import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.client.doctor import client_checks
from knnper.client.settings import read_client
from knnper.server.link.authorized import AuthorizedFolder
from knnper.transport.credentials import new_node_key, write_node_key
from knnper.transport.diagnosis import Finding, Verdict
from tests.processes import KNNPER, wait_until
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("federation")
    with running_server(folder, clients=("site-a",)) as running:
        yield running


def test_refusal_of_a_stranger_names_the_reason(
    server: RunningServer, tmp_path: Path
) -> None:
    write_node_key(tmp_path / "k", new_node_key())
    (tmp_path / "ca.crt").write_bytes((server.folder.server / "ca.crt").read_bytes())
    with server.supernode(tmp_path, tmp_path / "k") as node:
        node.wait(30)
        assert "is not registered with this federation" in node.written
    assert "is not registered with this federation" in server.printed
    with server.supernode(tmp_path, None) as node:
        node.wait(30)
        assert "registered clients only" in node.written


def test_flowers_commands_show_runs_and_register_no_client(
    server: RunningServer, tmp_path: Path
) -> None:
    write_node_key(tmp_path / "k", new_node_key())
    home = server.settings.flower_home
    register = ("supernode", "register", tmp_path / "k.pub", "federation")
    assert "registered successfully" in server.flwr(home, *register, "--name", "hand")
    with server.supernode(server.folder.client("site-a"), tmp_path / "k"):
        wait_until(
            lambda: "removed hand: its key is not in the folder" in server.printed
        )
    assert "Listing all runs" in server.flwr(home, "list", "federation")


def test_clients_join_and_leave_while_the_server_runs(server: RunningServer) -> None:
    client = server.add("late")
    wait_until(lambda: server.statuses.get("late") == "registered")
    with server.supernode(client, client / "late.key") as node:
        wait_until(lambda: server.statuses["late"] == "online")
        AuthorizedFolder(server.settings.authorized).remove("late")
        wait_until(lambda: "late" not in server.statuses)
        node.wait(30)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(end: signal.Signals, tmp_path: Path) -> None:
    with running_server(tmp_path, clients=("site-a",)) as server:
        server.process.process.send_signal(end)
        status = server.process.wait(30)
        assert status == (-end if end == signal.SIGKILL else 0)
        wait_until(lambda: not server.commands.processes())
        again = server.again()
        assert server.statuses == {"site-a": "registered"}
        assert again.stop() == 0


def test_a_renewed_certificate_is_taken_up(server: RunningServer) -> None:
    place = server.folder
    server.commands.run("renew", KNNPER, "fed", "renew", place.path)
    server.process.wait_for("the gateway uses the new certificate", 30)


def test_the_state_is_the_servers_own(server: RunningServer) -> None:
    state = server.settings.state
    paths = [state, *state.rglob("*")]
    assert {"superlink.db", "superlink.log"} <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def registration(server: RunningServer, key: Path) -> Finding:
    """Return the doctor's finding on a client's registration; the server is fine."""
    config = read_client(server.folder.client("site-a") / "client.yaml")
    client_config = replace(config, state=key.parent / "state", key=key)
    looks = {check.subject: check.look for check in client_checks(client_config)}
    for subject in ("gateway", "certificate"):
        assert looks[subject]().verdict is Verdict.OK
    return looks["registration"]()


def test_the_doctor_leaves_no_trace_and_disturbs_no_node(
    server: RunningServer, tmp_path: Path
) -> None:
    folder = server.folder.client("site-a")
    key = folder / "site-a.key"
    for _ in range(2):
        assert registration(server, key) == Finding(Verdict.OK, "registered as site-a")
        assert server.statuses["site-a"] == "registered"
    config = folder / "client.yaml"
    client = server.commands.start("client", [KNNPER, "fed", "client", config])
    client.wait_for("in the federation of")
    assert "its node runs" in registration(server, key).found
    second = registration(server, Path(shutil.copy(key, tmp_path)))
    assert second.verdict is Verdict.PROBLEM
    assert "heard of a node with this key" in second.found
    assert server.statuses["site-a"] == "online"
    time.sleep(2.0)
    assert "its node runs" in registration(server, key).found
    assert server.statuses["site-a"] == "online"
    client.stop()
