import json
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.doctor import Credentials
from knnper.client.flower_node import Activation, locked
from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_node_key,
)
from knnper.transport.diagnosis import Finding, Verdict
from tests.client.doctor.scripted_server import Script, answering, client, written

ACTIVATE = "/v1/fleet/activate-node"
# What Flower answers to a key that it knows, and to one that it does not.
KNOWN = {"code": 2003, "detail": "Invalid heartbeat interval."}
UNKNOWN = {"code": 2004, "detail": "Failed to activate SuperNode."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = new_authority("CA")
    written(folder, authority, "ca")
    written(folder, issue_server_certificate(authority, ["127.0.0.1"]), "server")
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_node_key(tmp_path / "site-a.key", new_node_key())
    return tmp_path / "site-a.key"


def credentials(key: Path, folder: Path, server: str = "127.0.0.1:1") -> Credentials:
    return Credentials(client(key.parent, server), key, folder / "ca.crt")


def told(key: Path, folder: Path, status: int, body: dict[str, object]) -> Finding:
    """Return what is found when the server answers with ``body``."""
    script = Script(answers={ACTIVATE: (status, json.dumps(body))})
    files = folder / "server.crt", folder / "server.key"
    with answering(script, files) as server:
        finding = credentials(key, folder, server).key_is_registered()
    (asked,) = script.bodies
    # Flower refuses this one before it changes anything.
    assert ActivateNodeRequest.FromString(asked).heartbeat_interval == 0
    return finding


def standing(name: str, idle_s: float | None) -> dict[str, object]:
    return {**KNOWN, "standing": {"name": name, "idle_s": idle_s}}


def test_a_key_as_it_should_be(key: Path, folder: Path) -> None:
    finding = credentials(key, folder).key_is_readable()
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith("SHA256:")


def test_a_key_that_others_can_read(key: Path, folder: Path) -> None:
    key.chmod(0o644)
    finding = credentials(key, folder).key_is_readable()
    assert finding.verdict is Verdict.WARNING
    assert finding.mend == f"run: chmod 600 {key}"


@pytest.mark.parametrize("content", [None, "no key", "pub"])
def test_a_key_that_is_none(key: Path, folder: Path, content: str | None) -> None:
    public = key.with_name("site-a.key.pub").read_text()
    key.unlink()
    if content is not None:
        key.write_text(public if content == "pub" else content)
    finding = credentials(key, folder).key_is_readable()
    assert finding.verdict is Verdict.PROBLEM
    assert str(key) in finding.found
    assert "fed register SERVER.yaml site-a site-a.key.pub" in finding.mend


def test_an_unknown_key(key: Path, folder: Path) -> None:
    finding = told(key, folder, 412, UNKNOWN)
    assert finding.verdict is Verdict.PROBLEM
    assert "is not registered with the server" in finding.found
    assert "send site-a.key.pub to the federation's operator" in finding.mend


def test_a_registered_key(key: Path, folder: Path) -> None:
    finding = told(key, folder, 400, standing("site-a", None))
    assert finding == Finding(Verdict.OK, "registered as site-a")
    # A server without the gateway tells no name.
    assert told(key, folder, 400, dict(KNOWN)).verdict is Verdict.OK


def test_a_key_under_another_name(key: Path, folder: Path) -> None:
    finding = told(key, folder, 400, standing("site-b", None))
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found == "the key is registered as site-b, and `name` is site-a"
    assert finding.mend.startswith("set `name: site-b`")


def test_a_second_node_under_a_taken_name(key: Path, folder: Path) -> None:
    finding = told(key, folder, 400, standing("site-a", 3.2))
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found.startswith("3 s ago the server heard of a node with this key")
    assert finding.mend.startswith("stop the other node")
    assert told(key, folder, 400, standing("site-a", 61.0)).verdict is Verdict.OK


def test_the_own_node_is_no_second_one(key: Path, folder: Path) -> None:
    with locked(key.parent / "state"):
        finding = told(key, folder, 400, standing("site-a", 0.1))
    assert finding.verdict is Verdict.OK
    assert "its node runs" in finding.found


def test_the_own_node_that_crashed_is_worth_a_warning(key: Path, folder: Path) -> None:
    state = key.parent / "state"
    with locked(state) as lock:
        Activation.of(state, lock).note(7)
    finding = told(key, folder, 400, standing("site-a", 3.0))
    assert finding.verdict is Verdict.WARNING
    assert "did not leave in order" in finding.found


def test_a_signature_that_is_not_taken(key: Path, folder: Path) -> None:
    body: dict[str, object] = {"detail": "Invalid", "extra": "The clock is 9 s ahead"}
    finding = told(key, folder, 401, body)
    assert finding.verdict is Verdict.PROBLEM
    assert "The clock is 9 s ahead" in finding.found


def test_an_answer_that_nobody_expects(key: Path, folder: Path) -> None:
    finding = told(key, folder, 500, {})
    assert finding.verdict is Verdict.PROBLEM
    assert "HTTP status 500" in finding.found


def test_no_answer(key: Path, folder: Path) -> None:
    finding = credentials(key, folder).key_is_registered()
    assert finding.found == "the server did not answer"
