"""A client gets another key while it runs; a server goes away and comes back."""

import shutil
from pathlib import Path

import pytest

from tests.federation.small_federation import Found
from tests.processes import KNNPER, wait_until

pytestmark = pytest.mark.slow
NAME, IN = "0000", "in the federation of"


def test_a_client_keeps_its_state_with_another_key(
    found: Found, tmp_path: Path
) -> None:
    federation = found(clients=[NAME])
    server = federation.server()
    client = federation.client(NAME)
    client.wait_for(IN)
    submitted, run = federation.submit("training.num_rounds=1")
    assert submitted.wait() == 0
    folder = federation.client_folder(NAME)
    kept = ["serving.json", "offered.json", "store/store.sqlite3"]
    before = {name: (folder / "state" / name).read_bytes() for name in kept[:2]}
    assert (folder / "state" / kept[2]).exists()
    stolen = tmp_path / "stolen"
    shutil.copytree(folder, stolen, ignore=shutil.ignore_patterns("state"))

    words = ("fed", "rotate-key", federation.folder, NAME)
    federation.commands.run("rotate", KNNPER, *words)
    server.wait_for(f"removed {NAME}: its key is not in the folder")
    wait_until(lambda: client.written.count(IN) == 2, "the client is in again")
    command = ("fed", "client", stolen / "client.yaml", "--patience", "0")
    thief = federation.start("thief", "thief", *command)
    assert thief.wait() == 1
    assert "does not accept this client's key" in thief.written
    assert thief.written.count(IN) == 0
    assert federation.resume(run).wait() == 0
    assert list(run.clients) == [NAME]
    for name, content in before.items():
        assert (folder / "state" / name).read_bytes() == content, name
    # It is the client's own state from now on, and a restart finds it so.
    assert client.stop() == 0
    again = federation.client(NAME)
    again.wait_for(IN)
    assert again.stop() == 0
    doctor = federation.start(
        NAME, "doctor", "site", "doctor", federation.client_file(NAME)
    )
    doctor.wait()
    assert f"registered as {NAME}" in doctor.written


def test_a_server_that_was_away_and_a_client_that_is_back(found: Found) -> None:
    federation = found(clients=[NAME])
    server = federation.server()
    client = federation.client(NAME)
    client.wait_for(IN)
    server.wait_for(f"client {NAME} is connected")
    assert server.stop() == 0
    away = f"waiting for the server: 127.0.0.1:{federation.port} has not answered for"
    client.wait_for(away)
    back = federation.server()
    client.wait_for("the server answers again, after")
    back.wait_for(f"client {NAME} is connected")
    assert client.stop() == 0
    back.wait_for(f"client {NAME} has left")
    again = federation.client(NAME)
    connected = f"client {NAME} is connected"
    wait_until(lambda: back.written.count(connected) == 2, "the client is back")
    assert again.stop() == 0
