import contextlib
import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link.authorized import AuthorizedFolder
from knnper.server.link.doctor import is_running, server_checks
from knnper.server.link.setup import LOCK, FederationFolder, create_federation
from knnper.server.settings import read_server
from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    read_identity,
)
from knnper.transport.diagnosis import Finding, Verdict, examine
from tests.client.doctor.scripted_server import Script, answering
from tests.processes import free_port


@pytest.fixture
def place(tmp_path: Path) -> FederationFolder:
    place = FederationFolder(tmp_path / "fed")
    create_federation(place, ["127.0.0.1"], free_port(), free_port())
    AuthorizedFolder(place.authorized).add("site-a", new_node_key().public_key())
    return place


def looked_at(place: FederationFolder, *changes: str) -> dict[str, Finding]:
    changes = (f"listen=127.0.0.1:{free_port()}", *changes)
    checks = server_checks(read_server(place.server_file, changes))
    return {result.subject: result.finding for result in examine(checks)}


@contextlib.contextmanager
def held(state: Path) -> Iterator[None]:
    """Hold the state folder as a running server does."""
    state.mkdir(exist_ok=True)
    with (state / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_server_before_its_first_start(place: FederationFolder) -> None:
    findings = looked_at(place)
    assert not (place.server / "state").exists()
    wrong = {
        subject: finding
        for subject, finding in findings.items()
        if finding.verdict is not Verdict.OK
    }
    assert set(wrong) == {"server"}
    assert wrong["server"].verdict is Verdict.PROBLEM
    assert findings["clients"].found.endswith("site-a")
    assert "is free" in findings["gateway port"].found


def test_missing_files(place: FederationFolder) -> None:
    (place.server / "server.crt").unlink()
    (place.server / "server.key").unlink()
    findings = looked_at(place)
    for subject in ("certificate", "key"):
        assert findings[subject].verdict is Verdict.PROBLEM
        assert "knnper fed init" in findings[subject].fix


@pytest.mark.parametrize(
    ("days", "verdict", "words"),
    [(-1, Verdict.PROBLEM, "expired on"), (9, Verdict.WARNING, "expires on")],
)
def test_validity(
    place: FederationFolder, days: int, verdict: Verdict, words: str
) -> None:
    authority = read_identity(place.authority / "ca.crt", place.authority / "ca.key")
    files = place.server / "server.crt", place.server / "server.key"
    for file in files:
        file.unlink()
    issue_server_certificate(authority, ["127.0.0.1"], days).write(*files)
    certificate = looked_at(place)["certificate"]
    assert certificate.verdict is verdict
    assert words in certificate.found
    assert "knnper fed renew" in certificate.fix


def test_files_that_do_not_belong_together(place: FederationFolder) -> None:
    (place.server / "ca.crt").unlink()
    (place.server / "server.key").unlink()
    stranger = new_authority("another CA")
    stranger.write(place.server / "ca.crt", place.server / "server.key")
    findings = looked_at(place)
    assert "was not signed by CN=another CA" in findings["certificate"].found
    assert findings["key"].verdict is Verdict.PROBLEM
    assert "they come as a pair" in findings["key"].fix


def test_a_key_that_others_can_read(place: FederationFolder) -> None:
    (place.server / "server.key").chmod(0o644)
    key = looked_at(place)["key"]
    assert key.verdict is Verdict.WARNING
    assert key.fix.startswith("run: chmod 600")


def test_ports_that_other_software_has(place: FederationFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        used_address = f"127.0.0.1:{other.getsockname()[1]}"
        findings = looked_at(place, f"listen={used_address}")
        assert findings["gateway port"].verdict is Verdict.PROBLEM
        assert f"other software has {used_address}" in findings["gateway port"].found
        assert "set `listen`" in findings["gateway port"].fix
        findings = looked_at(place, f"control={used_address}")
        assert "set `control`" in findings["control port"].fix


def test_a_running_server(place: FederationFolder) -> None:
    files = place.server / "server.crt", place.server / "server.key"
    state = place.server / "state"
    gateway, control = Script(), Script(headers={})
    with (
        held(state),
        answering(gateway, files) as listen,
        answering(control, files) as flower,
    ):
        assert is_running(state)
        findings = looked_at(place, f"listen={listen}", f"control={flower}")
        assert findings["server"].verdict is Verdict.OK
        assert findings["gateway port"].found == f"the server answers at {listen}"
        assert findings["control port"].found == f"the server answers at {flower}"
        # The control port answers, and the certificate of its answer is not trusted.
        assert findings["registered"].verdict is Verdict.PROBLEM
        swapped = looked_at(place, f"listen={flower}", f"control={listen}")
        for subject in ("gateway port", "control port"):
            assert "other software has" in swapped[subject].found
        assert swapped["registered"].verdict is Verdict.SKIPPED
    assert not is_running(state)


def test_a_server_that_does_not_answer(place: FederationFolder) -> None:
    files = place.server / "server.crt", place.server / "server.key"
    sick = Script(answers={"/health": (503, "")})
    with held(place.server / "state"):
        findings = looked_at(place)
        assert "does not answer" in findings["gateway port"].found
        with answering(sick, files) as listen:
            gateway = looked_at(place, f"listen={listen}")["gateway port"]
    assert "Flower's SuperLink does not answer (HTTP status 503)" in gateway.found
    assert "superlink.log" in gateway.fix


def test_wrong_files_among_the_clients(place: FederationFolder) -> None:
    first = place.authorized / "site-a.pub"
    (place.authorized / "site-b.pub").write_bytes(first.read_bytes())
    (place.authorized / "site-c.pub").write_text("no key")
    (place.server / "state").mkdir()
    (place.server / "state" / "roster.json").write_text("{}")
    findings = looked_at(place)
    assert "site-b" in findings["clients"].found
    assert "site-c.pub does not hold" in findings["clients"].found
    for name in ("site-b", "site-c"):
        (place.authorized / f"{name}.pub").unlink()
    assert "is damaged" in looked_at(place)["clients"].found


def test_without_certificates(tmp_path: Path) -> None:
    place = FederationFolder(tmp_path / "fed")
    create_federation(place, ["127.0.0.1"], free_port(), free_port(), insecure=True)
    findings = looked_at(place)
    assert findings["tls"].verdict is Verdict.WARNING
    assert "certificate" not in findings
