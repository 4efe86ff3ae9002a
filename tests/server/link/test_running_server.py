import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link.authorized import AuthorizedFolder
from knnper.transport.credentials import new_node_key, write_node_key
from tests.processes import wait_until
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("federation")
    with running_server(folder, clients=("site-a",)) as running:
        yield running


def test_strangers_are_told_why_they_are_refused(
    server: RunningServer, tmp_path: Path
) -> None:
    write_node_key(tmp_path / "k", new_node_key())
    (tmp_path / "ca.crt").write_bytes((server.folder.server / "ca.crt").read_bytes())
    with server.supernode(tmp_path, tmp_path / "k") as node:
        node.wait(30)
        assert "is not registered with this federation" in node.written
    assert "is not registered with this federation" in server.said
    with server.supernode(tmp_path, None) as node:
        node.wait(30)
        assert "registered clients only" in node.written


def test_a_client_can_neither_register_nor_run(
    server: RunningServer, tmp_path: Path
) -> None:
    ca = server.folder.client("site-a") / "ca.crt"
    (tmp_path / "config.toml").write_text(
        f'[superlink.gateway]\naddress = "{server.gateway}"\n'
        f'root-certificates = "{ca}"\n'
    )
    write_node_key(tmp_path / "k", new_node_key())
    app = tmp_path / "app"
    (app / "code").mkdir(parents=True)
    (app / "code" / "__init__.py").write_text("app = None\n")
    (app / "pyproject.toml").write_text(
        '[project]\nname = "code"\nversion = "1.0.0"\ndependencies = []\n'
        'license = "Apache-2.0"\n[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "code:app"\nclientapp = "code:app"\n'
    )
    register = ("supernode", "register", tmp_path / "k.pub", "gateway")
    for arguments in (register, ("run", app, "gateway")):
        said = server.flwr(tmp_path, *arguments)
        assert "This is the clients' port of the federation" in said
    assert "refused POST '/v1/control/register-node'" in server.said
    assert "refused POST '/v1/control/start-run'" in server.said


def test_flowers_own_commands_work_on_the_server(
    server: RunningServer, tmp_path: Path
) -> None:
    write_node_key(tmp_path / "k", new_node_key())
    home = server.settings.flower_home
    register = ("supernode", "register", tmp_path / "k.pub", "federation")
    assert "registered successfully" in server.flwr(home, *register, "--name", "hand")
    with server.supernode(server.folder.client("site-a"), tmp_path / "k"):
        wait_until(lambda: server.statuses.get("hand") == "online")
        wait_until(lambda: "hand" in server.settings.roster_file.read_text())
    assert "Listing all runs" in server.flwr(home, "list", "federation")


def test_who_comes_and_goes_while_the_server_runs(server: RunningServer) -> None:
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


def test_the_state_is_the_servers_own(server: RunningServer) -> None:
    state = server.settings.state
    paths = [state, *state.rglob("*")]
    assert {"superlink.db", "superlink.log"} <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_without_security_whoever_comes_is_a_client(tmp_path: Path) -> None:
    with running_server(tmp_path, insecure=True) as server:
        assert "Nothing is encrypted" in server.said
        client = server.add("site-a")
        with server.supernode(client, None):
            wait_until(lambda: "online" in server.statuses.values())
