"""The server's certificate, and the client's own key as the server knows it."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.doctor import Connection, Credentials, Trust
from knnper.client.flower_node import Activation, locked
from knnper.transport.credentials import (
    Identity,
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_node_key,
)
from knnper.transport.diagnosis import Finding, Verdict
from tests.client.doctor.scripted_server import Script, answering, client, told, written

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
DAY_S = timedelta(days=1).total_seconds()
ACTIVATE = "/v1/fleet/activate-node"
# What Flower answers to a key that it knows, and to one that it does not.
KNOWN = {"code": 2003, "detail": "Invalid heartbeat interval."}
UNKNOWN = {"code": 2004, "detail": "Failed to activate SuperNode."}


@pytest.fixture(scope="module")
def authority() -> Identity:
    return new_authority("CA of the federation")


def looked_at(
    folder: Path, server: Identity, ca: Identity, script: Script | None = None
) -> Finding:
    """Return what is found of a server's certificate by a client that trusts ``ca``."""
    trusted, _ = written(folder, ca, "ca")
    files = written(folder, server, "server")
    with answering(script or Script(), files) as address:
        trust = Trust(Connection(address, with_tls=True), trusted)
        told(trust.authority_is_readable(), OK)
        return trust.certificate_is_accepted()


@pytest.mark.parametrize(
    ("host", "days", "verdict", "found", "mend"),
    [
        ("127.0.0.1", 100, OK, "for 127.0.0.1, valid until", ""),
        ("127.0.0.1", 10, WARNING, "expires on", "knnper fed renew"),
        ("127.0.0.1", -1, PROBLEM, "expired on", "knnper fed renew"),
        ("a.org", 100, PROBLEM, "is for a.org, not for 127", "--host 127.0.0.1"),
    ],
)
def test_certificates(
    tmp_path: Path,
    authority: Identity,
    host: str,
    days: int,
    verdict: Verdict,
    found: str,
    mend: str,
) -> None:
    server = issue_server_certificate(authority, [host], days=days)
    told(looked_at(tmp_path, server, authority), verdict, found, mend)


def test_one_that_is_expired_by_a_wrong_clock(
    tmp_path: Path, authority: Identity
) -> None:
    server = issue_server_certificate(authority, ["127.0.0.1"], days=-1)
    finding = looked_at(tmp_path, server, authority, Script(ahead_s=-DAY_S - 600))
    told(finding, PROBLEM, "valid at the server's", "set this machine's clock")


def test_another_authority_and_all_that_is_wrong(
    tmp_path: Path, authority: Identity
) -> None:
    server = issue_server_certificate(authority, ["example.org"], days=-1)
    finding = looked_at(tmp_path, server, new_authority("another CA"))
    for words in ("expired on", "not for 127.0.0.1", "not signed by CN=another CA"):
        told(finding, PROBLEM, words, "copy the ca.crt")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    ca = tmp_path / "ca.crt"
    if content is not None:
        ca.write_text(content)
    finding = Trust(Connection("h:1", with_tls=True), ca).authority_is_readable()
    told(finding, PROBLEM, str(ca), "copy the federation's ca.crt there")


def test_an_expired_authority(tmp_path: Path) -> None:
    ca, _ = written(tmp_path, new_authority("old CA", days=-1), "ca")
    finding = Trust(Connection("h:1", with_tls=True), ca).authority_is_readable()
    told(finding, PROBLEM, "of the authority, the certificate expired on")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, authority: Identity) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    written(folder, authority, "ca")
    written(folder, issue_server_certificate(authority, ["127.0.0.1"]), "server")
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_node_key(tmp_path / "site-a.key", new_node_key())
    return tmp_path / "site-a.key"


def credentials(key: Path, folder: Path, server: str = "127.0.0.1:1") -> Credentials:
    return Credentials(client(key.parent, server), key, folder / "ca.crt")


def registered(key: Path, folder: Path, status: int, body: object) -> Finding:
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


def test_a_key_as_it_should_be_and_one_that_others_can_read(
    key: Path, folder: Path
) -> None:
    told(credentials(key, folder).key_is_readable(), OK, "SHA256:")
    key.chmod(0o644)
    finding = credentials(key, folder).key_is_readable()
    told(finding, WARNING, mend=f"chmod 600 {key}")


@pytest.mark.parametrize("content", [None, "no key", "pub"])
def test_a_key_that_is_none(key: Path, folder: Path, content: str | None) -> None:
    public = key.with_name("site-a.key.pub").read_text()
    key.unlink()
    if content is not None:
        key.write_text(public if content == "pub" else content)
    finding = credentials(key, folder).key_is_readable()
    mend = "fed register SERVER.yaml site-a site-a.key.pub"
    told(finding, PROBLEM, str(key), mend)


@pytest.mark.parametrize(
    ("status", "body", "verdict", "found", "mend"),
    [
        (412, UNKNOWN, PROBLEM, "is not registered", "send site-a.key.pub"),
        (400, standing("site-a", None), OK, "registered as site-a", ""),
        # A server without the gateway tells no name.
        (400, KNOWN, OK, "", ""),
        (400, standing("site-b", None), PROBLEM, "as site-b, and", "`name: site-b`"),
        (400, standing("site-a", 3.2), PROBLEM, "3 s ago", "stop the other node"),
        (400, standing("site-a", 61.0), OK, "", ""),
        (401, {"detail": "x", "extra": "9 s ahead"}, PROBLEM, "9 s ahead", "clocks"),
        (500, {}, PROBLEM, "HTTP status 500", ""),
    ],
)
def test_what_the_server_says_of_a_key(
    key: Path,
    folder: Path,
    status: int,
    body: object,
    verdict: Verdict,
    found: str,
    mend: str,
) -> None:
    told(registered(key, folder, status, body), verdict, found, mend)


def test_the_own_node_is_no_second_one(key: Path, folder: Path) -> None:
    state = key.parent / "state"
    with locked(state) as lock:
        finding = registered(key, folder, 400, standing("site-a", 0.1))
        told(finding, OK, "its node runs")
        Activation.of(state, lock).note(7)
    finding = registered(key, folder, 400, standing("site-a", 3.0))
    told(finding, WARNING, "did not leave in order")


def test_no_answer(key: Path, folder: Path) -> None:
    finding = credentials(key, folder).key_is_registered()
    assert finding.found == "the server did not answer"
