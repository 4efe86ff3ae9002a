"""The doctor before a real SuperLink with its gateway."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.client.doctor import client_checks
from knnper.client.settings import read_client
from knnper.server.link.doctor import server_checks
from knnper.server.link.registration import census
from knnper.server.link.setup import FederationFolder
from knnper.server.settings import read_server
from knnper.transport.diagnosis import Finding, Verdict, examine, is_well
from tests.processes import KNNPER
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Return a server that runs, with the client site-a."""
    with running_server(tmp_path_factory.mktemp("real"), ("site-a",)) as server:
        yield server


@pytest.fixture
def place(server: RunningServer) -> FederationFolder:
    return server.folder


def registration(place: FederationFolder, key: Path | None = None) -> Finding:
    config = read_client(place.client("site-a") / "client.yaml")
    port = read_server(place.server_file).listen_address.port
    key = key or place.client("site-a") / "site-a.key"
    state, server = key.parent / "state", f"127.0.0.1:{port}"
    own = replace(config, state=state, key=key, server=server)
    found = {one.subject: one.look for one in client_checks(own)}
    for subject in ("gateway", "certificate"):
        assert found[subject]().verdict is Verdict.OK
    return found["registration"]()


def status(place: FederationFolder) -> str:
    ((client,), _) = census(read_server(place.server_file))
    return client.status


def test_asking_leaves_no_trace(place: FederationFolder) -> None:
    for _ in range(2):
        assert registration(place) == Finding(Verdict.OK, "registered as site-a")
        assert status(place) == "registered"


def test_a_second_node_and_the_first_is_not_disturbed(
    server: RunningServer, place: FederationFolder, tmp_path: Path
) -> None:
    copied = shutil.copy(place.client("site-a") / "site-a.key", tmp_path)
    config = place.client("site-a") / "client.yaml"
    client = server.commands.start("client", [KNNPER, "fed", "client", config])
    client.wait_for("in the federation of")
    assert "its node runs" in registration(place).found
    second = registration(place, Path(copied))
    assert second.verdict is Verdict.PROBLEM
    assert "heard of a node with this key" in second.found
    assert status(place) == "online"
    time.sleep(2.0)
    assert "its node runs" in registration(place).found
    assert status(place) == "online"
    client.stop()


def test_the_server_itself(place: FederationFolder) -> None:
    examined = examine(server_checks(read_server(place.server_file)))
    assert is_well(examined), json.dumps([one.as_document() for one in examined])
    found = {one.subject: one.finding.found for one in examined}
    assert found["server"].startswith("runs")
    assert found["registered"].startswith("1 registered, online:")
