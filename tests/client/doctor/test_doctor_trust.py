from datetime import timedelta
from pathlib import Path

import pytest

from knnper.client.doctor import Connection, Trust
from knnper.transport.credentials import (
    Identity,
    issue_server_certificate,
    new_authority,
)
from knnper.transport.diagnosis import Finding, Verdict
from tests.client.doctor.scripted_server import Script, answering, written

DAY_S = timedelta(days=1).total_seconds()


@pytest.fixture(scope="module")
def authority() -> Identity:
    return new_authority("CA of the federation")


def looked_at(
    folder: Path,
    server: Identity,
    ca: Identity,
    script: Script | None = None,
) -> Finding:
    """Return what is found of a server's certificate by a client that trusts ``ca``."""
    trusted, _ = written(folder, ca, "ca")
    files = written(folder, server, "server")
    with answering(script or Script(), files) as address:
        trust = Trust(Connection(address, with_tls=True), trusted)
        assert trust.authority_is_readable().verdict is Verdict.OK
        return trust.certificate_is_accepted()


@pytest.mark.parametrize(
    ("hosts", "days", "verdict", "found", "mend"),
    [
        (
            ["127.0.0.1", "localhost"],
            100,
            Verdict.OK,
            "for localhost, 127.0.0.1, valid until",
            "",
        ),
        (["127.0.0.1"], 10, Verdict.WARNING, "expires on", "knnper fed renew"),
        (
            ["127.0.0.1"],
            -1,
            Verdict.PROBLEM,
            "the certificate expired on",
            "knnper fed renew",
        ),
        (
            ["federation.example.org"],
            100,
            Verdict.PROBLEM,
            "the certificate is for federation.example.org, not for 127.0.0.1",
            "renew it with --host 127.0.0.1",
        ),
    ],
)
def test_certificates(
    tmp_path: Path,
    authority: Identity,
    hosts: list[str],
    days: int,
    verdict: Verdict,
    found: str,
    mend: str,
) -> None:
    server = issue_server_certificate(authority, hosts, days=days)
    finding = looked_at(tmp_path, server, authority)
    assert finding.verdict is verdict
    assert found in finding.found
    assert mend in (finding.mend or "")


def test_one_that_is_expired_by_a_wrong_clock(
    tmp_path: Path, authority: Identity
) -> None:
    server = issue_server_certificate(authority, ["127.0.0.1"], days=-1)
    before = Script(ahead_s=-DAY_S - 600)
    finding = looked_at(tmp_path, server, authority, before)
    assert "which is this machine's time, and valid at the server's" in finding.found
    assert finding.mend == "set this machine's clock"


def test_another_authority(tmp_path: Path, authority: Identity) -> None:
    server = issue_server_certificate(authority, ["127.0.0.1"])
    finding = looked_at(tmp_path, server, new_authority("another CA"))
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found.endswith("was not signed by CN=another CA")
    assert finding.mend.startswith("copy the ca.crt of this federation")


def test_everything_that_is_wrong_is_said(tmp_path: Path, authority: Identity) -> None:
    server = issue_server_certificate(authority, ["example.org"], days=-1)
    finding = looked_at(tmp_path, server, new_authority("another CA"))
    for words in ("expired on", "not for 127.0.0.1", "was not signed by"):
        assert words in finding.found


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    ca = tmp_path / "ca.crt"
    if content is not None:
        ca.write_text(content)
    finding = Trust(Connection("h:1", with_tls=True), ca).authority_is_readable()
    assert finding.verdict is Verdict.PROBLEM
    assert str(ca) in finding.found
    assert "copy the federation's ca.crt there" in finding.mend


def test_an_expired_authority(tmp_path: Path) -> None:
    ca, _ = written(tmp_path, new_authority("old CA", days=-1), "ca")
    finding = Trust(Connection("h:1", with_tls=True), ca).authority_is_readable()
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found.startswith("of the authority, the certificate expired on")
