"""``knnper site token`` and ``knnper site serve`` as they are typed."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.client.service.access import Tokens
from knnper_cli.app import app
from tests.client.service.serve_process import serve_process
from tests.client.service.small_service import some_inputs

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {name: image_folder, path: data}
service: {port: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "client.yaml"
    path.write_text(FILE)
    return path


def token(config: Path, command: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["site", "token", command, str(config), *words])


def test_tokens_are_made_listed_and_revoked(config: Path) -> None:
    made = token(config, "add", "tablet")
    wide = token(config, "add", "ward", "--scope", "delete", "--scope", "add")
    assert (made.exit_code, wide.exit_code) == (0, 0)
    tokens = Tokens(config.parent / "state", "a token of the owner's")
    caller = tokens.caller(f"Bearer {made.stdout.strip()}")
    assert caller is not None
    assert (caller.name, list(caller.scopes)) == ("tablet", ["predict"])
    listed = json.loads(token(config, "list", "--json").stdout)
    assert [(one["name"], one["scopes"]) for one in listed] == [
        ("tablet", "predict"),
        ("ward", "add, delete"),
    ]
    assert "tablet" in token(config, "list").stdout
    assert token(config, "revoke", "tablet").exit_code == 0
    assert tokens.caller(f"Bearer {made.stdout.strip()}") is None
    assert tokens.caller(f"Bearer {wide.stdout.strip()}") is not None


def test_what_is_no_scope_is_refused(config: Path) -> None:
    result = token(config, "add", "tablet", "--scope", "neighbours")
    assert result.exit_code == 2
    assert "neighbors" in result.output
    assert token(config, "revoke", "tablet").exit_code == 1


def test_no_token_is_refused_where_others_can_ask(config: Path) -> None:
    command = ["site", "serve", str(config), "--no-token"]
    result = CliRunner().invoke(app, [*command, "--set", "service.host=0.0.0.0"])
    assert result.exit_code == 1
    assert "expected a loopback one" in result.output
    assert "Warning: 0.0.0.0 is open to other machines, without TLS" in result.output


@pytest.mark.slow
def test_a_client_serves_what_is_installed_until_it_is_told_to_stop(
    tmp_path: Path,
) -> None:
    with serve_process(tmp_path) as client:
        answer = client.post("/predict", json={"inputs": some_inputs(1).tolist()})
    assert answer.json()["num_stored"] == 6
