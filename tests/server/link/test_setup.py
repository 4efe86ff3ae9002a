import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.federation import federation
from knnper.errors import ConfigError
from knnper.server.settings import read_server
from knnper.transport.credentials import (
    authority_problem,
    expiry_problem,
    fingerprint,
    host_problem,
    hosts_of,
    new_node_key,
    parse_address,
    read_certificate,
    read_node_key,
    read_public_key,
    write_node_key,
)
from knnper.yaml_text import parse_yaml


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(federation, [str(argument) for argument in arguments])


def done(*arguments: object) -> Result:
    result = ask(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "fed"
    hosts = ("--host", "fed.example.org", "--host", "192.0.2.7")
    done("init", place, *hosts, "--client", "site-a", "--port", 9443)
    return place


def test_a_new_federation_fits_together(folder: Path) -> None:
    settings = read_server(folder / "server" / "server.yaml")
    assert settings.listen_address.port == 9443
    assert settings.tls is not None
    certificate = read_certificate(settings.tls.certificate)
    authority = read_certificate(folder / "clients" / "site-a" / "ca.crt")
    for host in ("fed.example.org", "192.0.2.7", "localhost", "127.0.0.1"):
        assert host_problem(certificate, host) is None
    assert authority_problem(certificate, authority) is None
    assert expiry_problem(certificate, datetime.now(UTC)) is None


def test_a_client_gets_its_key_and_the_server_its_public_half(folder: Path) -> None:
    client = folder / "clients" / "site-a"
    key = read_node_key(client / "site-a.key")
    authorized = read_public_key(folder / "server" / "authorized" / "site-a.pub")
    assert fingerprint(authorized) == fingerprint(key.public_key())
    document = parse_yaml((client / "client.yaml").read_text(), "client.yaml")
    assert document["name"] == "site-a"
    assert document["server"] == "fed.example.org:9443"
    assert (document["tls"], document["key"]) == ({"ca": "ca.crt"}, "site-a.key")


def test_secrets_are_their_owners(folder: Path) -> None:
    secrets = list(folder.rglob("*.key"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert "ca.key" not in {path.name for path in (folder / "server").iterdir()}


def test_a_federation_is_not_founded_twice(folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert ask("init", folder, "--host", "x").exit_code == 1
    assert ask("add-client", folder, "site-a").exit_code == 1
    assert ask("add-client", folder, "../x").exit_code == 1
    after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert after == before


def test_more_clients(folder: Path, tmp_path: Path) -> None:
    done("add-client", folder, "site-b", "--host", "10.0.0.1")
    text = (folder / "clients" / "site-b" / "client.yaml").read_text()
    assert "10.0.0.1:9443" in text
    write_node_key(tmp_path / "c.key", new_node_key())
    done("register", folder, "site-c", tmp_path / "c.key.pub")
    done("remove-client", folder / "server" / "server.yaml", "site-a")
    listed = CliRunner().invoke(federation, ["list", str(folder), "--json"])
    clients = json.loads(listed.stdout)
    assert [client["name"] for client in clients] == ["site-b", "site-c"]
    assert {client["status"] for client in clients} == {"authorized"}
    assert "the server has never run" in listed.stderr


def test_renewing_keeps_authority_and_hosts(folder: Path) -> None:
    server = folder / "server"
    before = read_certificate(server / "server.crt")
    done("renew", folder, "--host", "new.example.org", "--days", 30)
    after = read_certificate(server / "server.crt")
    assert after.serial_number != before.serial_number
    assert {*hosts_of(before), "new.example.org"} == set(hosts_of(after))
    assert authority_problem(after, read_certificate(server / "ca.crt")) is None
    assert read_certificate(server / "server.crt.old") == before


def test_without_security(tmp_path: Path) -> None:
    output = done("init", tmp_path, "--host", "h", "--client", "a", "--insecure").output
    assert "nothing is encrypted" in output
    assert not list(tmp_path.rglob("*.key"))
    assert read_server(tmp_path / "server" / "server.yaml").insecure
    assert "insecure: true" in (tmp_path / "clients" / "a" / "client.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "host", "loopback"),
    [
        ("example.org:1", "example.org", False),
        ("[::1]:8443", "::1", True),
        ("127.3.0.1:65535", "127.3.0.1", True),
        ("localhost:80", "localhost", True),
        ("0.0.0.0:80", "0.0.0.0", False),
        ("[::]:80", "::", False),
        ("192.168.0.1:80", "192.168.0.1", False),
    ],
)
def test_addresses(text: str, host: str, loopback: bool) -> None:
    address = parse_address(text)
    assert (address.host, address.is_loopback, str(address)) == (host, loopback, text)


@pytest.mark.parametrize(
    "text", ["host", ":1", "h:0", "h:65536", "::1:80", "[h]:80", "https://h:1", "h:1x"]
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(text)


TLS = "tls: {ca: ca.crt, certificate: server.crt, key: /keys/server.key}\n"


def written(folder: Path, text: str | None) -> Path:
    file = folder / "server.yaml"
    if text is not None:
        file.write_text(text)
    return file


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    settings = read_server(written(tmp_path, TLS + "state: /var/state\n"))
    assert settings.tls is not None
    assert settings.tls.certificate == tmp_path / "server.crt"
    assert settings.tls.key == Path("/keys/server.key")
    assert settings.authorized == tmp_path / "authorized"
    assert settings.roster_file == Path("/var/state/roster.json")
    assert settings.runs_folder == Path("/var/state/runs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "knnper fed init"),
        ("", "expected a mapping"),
        ("name: f\n", "tls: expected {ca: ..., certificate"),
        (TLS + "insecure: true\n", "expected one of the two"),
        (TLS + "control: 0.0.0.0:8000\n", "expected a loopback address"),
        (TLS + "listen: 127.0.0.1:8000\n", "the address of control"),
        (TLS + "listen: localhost\n", "expected HOST:PORT"),
        (TLS + "lisen: a:1\n", "lisen: unknown setting; did you mean 'listen'"),
        (TLS + "name: a b\n", "name: found"),
        ("tls: {ca: ca.crt}\n", "tls.certificate: expected a value"),
    ],
)
def test_problem_is_reported(text: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server(written(tmp_path, text))


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    file = written(tmp_path, "listen: nowhere\ncontrol: 0.0.0.0:1\n")
    with pytest.raises(ConfigError) as caught:
        read_server(file)
    places = [problem.place for problem in caught.value.problems]
    assert places == ["tls", "listen", "control"]
