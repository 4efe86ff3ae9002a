"""``knnper site token`` as it is typed."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.client.service.access import Tokens
from knnper_cli.app import app

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {name: image_folder, path: data}
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
