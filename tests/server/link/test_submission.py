"""Runs are submitted with Flower's command; here it says what it is told to."""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from knnper.config.errors import RunError
from server.link import submission
from server.link.app_bundle import write_bundle
from server.settings import ServerSettings


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(state=tmp_path / "state")


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what sets the answer of the command, which notes how it was called."""
    command = tmp_path / "bin" / "flwr"
    command.parent.mkdir()

    def answers(text: str) -> Path:
        noted = tmp_path / "noted.json"
        command.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"noted = open({str(noted)!r}, 'w')\n"
            "json.dump([sys.argv[1:], os.environ['FLWR_HOME']], noted)\n"
            f"print({text!r})\n"
        )
        command.chmod(0o700)
        return noted

    monkeypatch.setattr(submission, "flower_command", lambda name: command)
    return answers


def test_a_run_is_submitted_and_has_an_id(settings: ServerSettings, flwr: Any) -> None:
    noted = flwr('some words first {"success": true, "run-id": "123"}')
    assert submission.submit(settings, {"experiment": "x"}) == 123
    arguments, home = json.loads(noted.read_text())
    assert arguments[0] == "run"
    assert arguments[2:] == ["federation", "--format", "json"]
    assert home == str(settings.flower_home)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"success": false, "error-message": "no such app"}', "no such app"),
        ('{"success": true}', "did not take the run"),
        ("Connection refused", "Is the server running.*127.0.0.1:8000"),
    ],
)
def test_what_goes_wrong_is_said(
    settings: ServerSettings, flwr: Any, answer: str, said: str
) -> None:
    flwr(answer)
    with pytest.raises(RunError, match=said):
        submission.submit(settings, {})


def test_without_a_server_there_is_no_status(settings: ServerSettings) -> None:
    alone = dataclasses.replace(settings, insecure=True, control="127.0.0.1:1")
    with pytest.raises(RunError, match="cannot be reached to find the run 5"):
        submission.status(alone, 5)


def test_the_bundle_has_settings_and_no_code_of_its_own(tmp_path: Path) -> None:
    write_bundle(tmp_path, {"document": '{"name": "x"}', "resume": True})
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["installed.py", "pyproject.toml"]
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    app = project["tool"]["flwr"]["app"]
    assert app["config"] == {"document": '{"name": "x"}', "resume": True}
    code = (tmp_path / "installed.py").read_text()
    for name in ("client", "server"):
        assert f"from knnper.apps.{name} import {name}_app" in code


def test_the_bundle_takes_every_key_of_the_project(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    app = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert set(app["config"]) == submission.CONFIG_KEYS
    assert app["components"] == {
        "serverapp": "knnper.apps.server:server_app",
        "clientapp": "knnper.apps.client:client_app",
    }
