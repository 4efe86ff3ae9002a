import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from knnper.errors import CredentialError
from knnper.transport.credentials import (
    Identity,
    authority_problem,
    expires_soon,
    expiry_problem,
    fingerprint,
    host_problem,
    hosts_of,
    issue_server_certificate,
    main_host_of,
    new_authority,
    new_node_key,
    permission_problem,
    read_certificate,
    read_identity,
    read_node_key,
    read_public_key,
    write_certificate,
    write_node_key,
)


def ssh_keygen(*arguments: str | Path) -> str:
    command = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_was_written_is_read(tmp_path: Path) -> None:
    key = new_node_key()
    write_node_key(tmp_path / "a.key", key)
    private = read_node_key(tmp_path / "a.key")
    assert private.private_numbers() == key.private_numbers()
    public = read_public_key(tmp_path / "a.key.pub")
    assert fingerprint(public) == fingerprint(key.public_key())
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


def test_openssh_agrees_on_the_fingerprint(tmp_path: Path) -> None:
    key = new_node_key()
    write_node_key(tmp_path / "a.key", key)
    assert fingerprint(key.public_key()) in ssh_keygen("-l", "-f", tmp_path / "a.key")


def test_a_key_of_openssh_is_read(tmp_path: Path) -> None:
    file = tmp_path / "b.key"
    ssh_keygen("-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", file)
    public = fingerprint(read_public_key(tmp_path / "b.key.pub"))
    assert fingerprint(read_node_key(file).public_key()) == public


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-t", "ecdsa", "-N", "secret"), "without a passphrase"),
        (("-t", "ed25519", "-N", ""), "Ed25519"),
        (("-t", "ecdsa", "-m", "PEM", "-N", ""), "expected|does not hold"),
    ],
)
def test_other_private_keys(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    ssh_keygen("-q", *arguments, "-f", tmp_path / "c")
    with pytest.raises(CredentialError, match=message):
        read_node_key(tmp_path / "c")


def test_the_two_halves_are_told_apart(tmp_path: Path) -> None:
    write_node_key(tmp_path / "a.key", new_node_key())
    with pytest.raises(CredentialError, match=r"give the file that ends in \.pub"):
        read_public_key(tmp_path / "a.key")
    with pytest.raises(CredentialError, match="this is no private key"):
        read_node_key(tmp_path / "a.key.pub")


def test_a_key_pair_is_not_overwritten(tmp_path: Path) -> None:
    write_node_key(tmp_path / "a.key", new_node_key())
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(CredentialError, match="exists already"):
        write_node_key(tmp_path / "a.key", new_node_key())
    assert (tmp_path / "a.key").read_bytes() == before


HOSTS = ("federation.example.org", "192.0.2.7", "::1", "*.lab.example.org")

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> Identity:
    return new_authority("test authority")


@pytest.fixture(scope="module")
def server(authority: Identity) -> Identity:
    return issue_server_certificate(authority, HOSTS, days=90)


def test_openssl_accepts_what_is_issued(
    authority: Identity, server: Identity, tmp_path: Path
) -> None:
    authority.write(tmp_path / "ca.crt", tmp_path / "ca.key")
    server.write(tmp_path / "server.crt", tmp_path / "server.key")
    strict = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver")
    files = ("-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "server.crt"))
    subprocess.run([*strict, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")


def test_only_the_owner_reads_the_key(server: Identity, tmp_path: Path) -> None:
    server.write(tmp_path / "server.crt", tmp_path / "server.key")
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert permission_problem(tmp_path / "server.key") is None
    (tmp_path / "server.key").chmod(0o640)
    problem = permission_problem(tmp_path / "server.key")
    assert problem is not None
    assert "chmod 600" in problem


def test_nothing_is_overwritten(server: Identity, tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("precious")
    with pytest.raises(CredentialError, match="never overwritten"):
        write_certificate(file, server.certificate)
    assert file.read_text() == "precious"


def test_hosts_are_read_back(server: Identity) -> None:
    assert set(hosts_of(server.certificate)) == set(HOSTS)
    assert main_host_of(server.certificate) == HOSTS[0]


def test_the_first_host_may_be_an_address_or_very_long(authority: Identity) -> None:
    for first in ("192.0.2.7", f"{'a' * 60}.{'b' * 60}.example.org"):
        issued = issue_server_certificate(authority, (first, "localhost"))
        assert main_host_of(issued.certificate) == first


def test_a_server_is_not_valid_longer_than_its_authority() -> None:
    authority = new_authority("short", days=3)
    issued = issue_server_certificate(authority, HOSTS, days=30).certificate
    assert issued.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_an_identity_is_read_back(server: Identity, tmp_path: Path) -> None:
    server.write(tmp_path / "c", tmp_path / "k")
    read = read_identity(tmp_path / "c", tmp_path / "k")
    assert read.certificate == server.certificate
    assert read.key.public_key() == read.certificate.public_key()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), ("hello", "does not hold a certificate in PEM")],
)
def test_unreadable_certificates(
    content: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CredentialError, match=message):
        read_certificate(file)


def test_a_valid_certificate_has_no_problem(
    authority: Identity, server: Identity
) -> None:
    assert expiry_problem(server.certificate, NOW) is None
    assert expires_soon(server.certificate, NOW) is None
    assert authority_problem(server.certificate, authority.certificate) is None


@pytest.mark.parametrize(
    ("days", "message"), [(91, "expired on"), (-1, "set the clock")]
)
def test_a_certificate_out_of_its_time(
    days: int, message: str, server: Identity
) -> None:
    problem = expiry_problem(server.certificate, NOW + timedelta(days=days))
    assert problem is not None
    assert message in problem


def test_a_certificate_that_soon_expires(server: Identity) -> None:
    problem = expires_soon(server.certificate, NOW + timedelta(days=70))
    assert problem is not None
    assert "fed renew" in problem


@pytest.mark.parametrize(
    "host",
    ["Federation.Example.org", "192.0.2.7", "0:0:0:0:0:0:0:1", "a.lab.example.org"],
)
def test_hosts_of_the_certificate(host: str, server: Identity) -> None:
    assert host_problem(server.certificate, host) is None


@pytest.mark.parametrize(
    "host", ["example.org", "192.0.2.8", "lab.example.org", "a.b.lab.example.org"]
)
def test_other_hosts(host: str, server: Identity) -> None:
    problem = host_problem(server.certificate, host)
    assert problem is not None
    assert f"not for {host}" in problem


def test_another_authority_of_the_same_name(server: Identity) -> None:
    other = new_authority("test authority").certificate
    problem = authority_problem(server.certificate, other)
    assert problem is not None
    assert "copy the ca.crt" in problem
