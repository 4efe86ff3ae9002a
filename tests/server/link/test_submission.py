"""Submission of runs, with a stand-in for Flower's command."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.server.link import submission
from knnper.server.link.registration import RunStatus
from knnper.server.link.submission import write_bundle
from knnper.server.settings import ServerSettings

APPS = "knnper.cli.flower_apps"


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(state=tmp_path / "state")


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the command by one with a fixed output.

    It returns the file in which the command notes its arguments.
    """
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
    assert submission.submit(settings, {"experiment": "x"}, APPS) == 123
    arguments, home = json.loads(noted.read_text())
    assert arguments[0] == "run"
    assert arguments[2:] == ["federation", "--format", "json"]
    assert home == str(settings.flower_home)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"success": false, "error-message": "no such app"}', "no such app"),
        ('{"success": true}', "did not take the run"),
        ("Connection refused", "Is the server running.*127.0.0.1:8000"),
    ],
)
def test_failure_is_reported(
    settings: ServerSettings, flwr: Any, answer: str, message: str
) -> None:
    flwr(answer)
    with pytest.raises(RunError, match=message):
        submission.submit(settings, {}, APPS)


FLOWERS = "\x1b[91mERROR \x1b[0m:     Exit Code: 201\n\nFor more information, visit"


@pytest.mark.parametrize(
    ("details", "log", "expected"),
    [
        # An error of this project: its message alone.
        (
            "ServerApp failed with exception: no client came",
            f"INFO: 1\nERROR: the run has ended: no client came\n{FLOWERS}",
            "no client came",
        ),
        # Any other error: with the end of the log, without Flower's own lines.
        (
            "ServerApp failed with exception: 'x'",
            f"\x1b[92mINFO \x1b[0m: 1\nKeyError: 'x'\n\n{FLOWERS}",
            "failed 'x'\nINFO : 1\nKeyError: 'x'",
        ),
        ("", "", "failed"),
    ],
)
def test_why_a_run_ended(
    settings: ServerSettings,
    flwr: Any,
    monkeypatch: pytest.MonkeyPatch,
    details: str,
    log: str,
    expected: str,
) -> None:
    flwr(log)
    ended = RunStatus("finished", "failed", details)
    monkeypatch.setattr(submission, "status", lambda settings, run_id: ended)
    assert submission.why_ended(settings, 7) == expected


def test_a_log_that_cannot_be_shown_does_not_hide_how_a_run_ended(
    settings: ServerSettings, flwr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def output_of(*_: object) -> str:
        raise RunError("flwr log did not end within 120 s")

    ended = RunStatus("finished", "failed", "out of memory")
    monkeypatch.setattr(submission, "status", lambda settings, run_id: ended)
    monkeypatch.setattr(submission, "_output_of", output_of)
    message = submission.why_ended(settings, 7)
    assert message.startswith("failed out of memory; its log cannot be shown: flwr log")


def test_submission_without_an_answer_names_the_command_that_lists_runs(
    settings: ServerSettings,
    tmp_path: Path,
    flwr: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flwr("")
    (tmp_path / "bin" / "flwr").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(submission, "PATIENCE_S", 0.1)
    with pytest.raises(RunError, match=r"did not end within 0\.1 s") as refused:
        submission.submit(settings, {}, APPS)
    command = f"FLWR_HOME={settings.flower_home} flwr list federation"
    assert command in str(refused.value)


def test_the_bundle_has_settings_and_no_code_of_its_own(tmp_path: Path) -> None:
    write_bundle(tmp_path, {"document": '{"name": "x"}', "resume": True}, APPS)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["installed.py", "pyproject.toml"]
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    app = project["tool"]["flwr"]["app"]
    assert app["config"] == {"document": '{"name": "x"}', "resume": True}
    code = (tmp_path / "installed.py").read_text()
    for name in ("client", "server"):
        assert f"from knnper.cli.flower_apps import {name}_app" in code


def test_the_bundle_takes_every_key_of_the_project(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    app = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    keys = {"experiment", "document", "set", "output", "overwrite", "resume"}
    assert app["config"].keys() == keys | {"registry"}
    assert app["components"] == {
        "serverapp": "knnper.cli.flower_apps:server_app",
        "clientapp": "knnper.cli.flower_apps:client_app",
    }
