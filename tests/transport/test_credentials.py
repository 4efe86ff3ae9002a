import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from knnper.errors import CredentialError
from knnper.transport import credentials


def ssh_keygen(*arguments: str | Path) -> str:
    command = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_was_written_is_read(tmp_path: Path) -> None:
    key = credentials.new_node_key()
    credentials.write_node_key(tmp_path / "a.key", key)
    private = credentials.read_node_key(tmp_path / "a.key")
    assert private.private_numbers() == key.private_numbers()
    public = credentials.read_public_key(tmp_path / "a.key.pub")
    assert credentials.fingerprint(public) == credentials.fingerprint(key.public_key())
    assert credentials.fingerprint(public) in ssh_keygen("-l", "-f", tmp_path / "a.key")
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    with pytest.raises(CredentialError, match=r"give the file that ends in \.pub"):
        credentials.read_public_key(tmp_path / "a.key")
    with pytest.raises(CredentialError, match="this is no private key"):
        credentials.read_node_key(tmp_path / "a.key.pub")
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(CredentialError, match="exists already"):
        credentials.write_node_key(tmp_path / "a.key", credentials.new_node_key())
    assert (tmp_path / "a.key").read_bytes() == before


def test_a_key_of_openssh_is_read(tmp_path: Path) -> None:
    file = tmp_path / "b.key"
    ssh_keygen("-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", file)
    public = credentials.fingerprint(
        credentials.read_public_key(tmp_path / "b.key.pub")
    )
    assert (
        credentials.fingerprint(credentials.read_node_key(file).public_key()) == public
    )


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
        credentials.read_node_key(tmp_path / "c")


HOSTS = ("federation.example.org", "192.0.2.7", "::1", "*.lab.example.org")

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> credentials.CertifiedKey:
    return credentials.new_authority("test authority")


@pytest.fixture(scope="module")
def server(authority: credentials.CertifiedKey) -> credentials.CertifiedKey:
    return credentials.issue_server_certificate(authority, HOSTS, days=90)


def test_openssl_accepts_what_is_issued(
    authority: credentials.CertifiedKey,
    server: credentials.CertifiedKey,
    tmp_path: Path,
) -> None:
    authority.write(tmp_path / "ca.crt", tmp_path / "ca.key")
    server.write(tmp_path / "server.crt", tmp_path / "server.key")
    strict = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver")
    files = ("-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "server.crt"))
    subprocess.run([*strict, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")


def test_nothing_is_overwritten(
    server: credentials.CertifiedKey, tmp_path: Path
) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("precious")
    with pytest.raises(CredentialError, match="never overwritten"):
        credentials.write_certificate(file, server.certificate)
    assert file.read_text() == "precious"


def test_the_first_host_may_be_an_address_or_very_long(
    authority: credentials.CertifiedKey,
) -> None:
    for first in ("192.0.2.7", f"{'a' * 60}.{'b' * 60}.example.org"):
        issued = credentials.issue_server_certificate(authority, (first, "localhost"))
        assert credentials.main_host_of(issued.certificate) == first


def test_a_server_is_not_valid_longer_than_its_authority() -> None:
    authority = credentials.new_authority("short", days=3)
    issued = credentials.issue_server_certificate(authority, HOSTS, days=30).certificate
    assert issued.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_an_identity_is_read_back(
    server: credentials.CertifiedKey, tmp_path: Path
) -> None:
    server.write(tmp_path / "c", tmp_path / "k")
    read = credentials.read_identity(tmp_path / "c", tmp_path / "k")
    assert read.certificate == server.certificate
    assert read.key.public_key() == read.certificate.public_key()
    assert set(credentials.hosts_of(read.certificate)) == set(HOSTS)
    assert credentials.main_host_of(read.certificate) == HOSTS[0]


def test_unreadable_certificates(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    with pytest.raises(CredentialError, match="there is no file"):
        credentials.read_certificate(file)
    file.write_text("hello")
    with pytest.raises(CredentialError, match="does not hold a certificate in PEM"):
        credentials.read_certificate(file)


def test_a_certificate_has_its_time(server: credentials.CertifiedKey) -> None:
    assert credentials.expiry_problem(server.certificate, NOW) is None
    assert credentials.expires_soon(server.certificate, NOW) is None
    for days, problem_at, message in (
        (91, credentials.expiry_problem, "expired on"),
        (-1, credentials.expiry_problem, "set the clock"),
        (70, credentials.expires_soon, "fed renew"),
    ):
        moment = NOW + timedelta(days=days)
        assert message in str(problem_at(server.certificate, moment))


def test_a_certificate_is_of_some_hosts(server: credentials.CertifiedKey) -> None:
    own = "Federation.Example.org 192.0.2.7 0:0:0:0:0:0:0:1 a.lab.example.org"
    for host in own.split():
        assert credentials.host_problem(server.certificate, host) is None
    other = "example.org 192.0.2.8 lab.example.org a.b.lab.example.org"
    for host in other.split():
        assert f"not for {host}" in str(
            credentials.host_problem(server.certificate, host)
        )


def test_a_certificate_is_of_one_authority(
    authority: credentials.CertifiedKey, server: credentials.CertifiedKey
) -> None:
    assert (
        credentials.authority_problem(server.certificate, authority.certificate) is None
    )
    of_the_same_name = credentials.new_authority("test authority").certificate
    problem = credentials.authority_problem(server.certificate, of_the_same_name)
    assert "copy the ca.crt" in str(problem)
