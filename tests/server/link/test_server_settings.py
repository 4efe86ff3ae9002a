import dataclasses
from pathlib import Path

import pytest

from knnper.errors import ConfigError
from knnper.server.settings import ServerSettings, read_server

TLS = "tls: {ca: ca.crt, certificate: server.crt, key: /keys/server.key}\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "server.yaml"
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


def test_overrides(tmp_path: Path) -> None:
    settings = read_server(written(tmp_path, TLS), ['listen="[::1]:9000"', "runs=r"])
    assert str(settings.listen_address) == "[::1]:9000"
    assert settings.runs_folder == tmp_path / "r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("name: f\n", "tls: expected {ca: ..., certificate"),
        (TLS + "insecure: true\n", "expected one of the two"),
        (TLS + "control: 0.0.0.0:8000\n", "expected a loopback address"),
        (TLS + "control: example.org:8000\n", "expected a loopback address"),
        (TLS + "listen: 127.0.0.1:8000\n", "the address of control"),
        (TLS + "listen: localhost\n", "expected HOST:PORT"),
        (TLS + "listen: ::1:8443\n", r"as in .* or \[::1\]:8443"),
        (TLS + "lisen: a:1\n", "lisen: unknown setting; did you mean 'listen'"),
        (TLS + "name: a b\n", "name: found"),
        ("tls: {ca: ca.crt}\n", "tls.certificate: expected a value"),
        (TLS + "max_in_flight_mb: 0\n", "max_in_flight_mb"),
        (TLS + "max_upload_mb: 0\n", "max_upload_mb"),
        (TLS + "max_request_mb: 0\n", "max_request_mb"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server(written(tmp_path, text))


def test_all_problems_are_told_together(tmp_path: Path) -> None:
    file = written(tmp_path, "listen: nowhere\ncontrol: 0.0.0.0:1\n")
    with pytest.raises(ConfigError) as caught:
        read_server(file)
    assert [one.place for one in caught.value.problems] == ["tls", "listen", "control"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knnper fed init"):
        read_server(tmp_path / "server.yaml")


def test_the_page_has_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text()
    table = page.partition("## The server's file")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if "| `" in line]
    told = {key.strip(" `"): default.strip(" `") for key, default in rows}
    others = {"tls": "*required*", "runs": "state/runs", "max_upload_mb": "none"}
    assert told == {
        one.name: others.get(one.name, str(one.default).lower())
        for one in dataclasses.fields(ServerSettings)
    } | {"insecure": "false"}
