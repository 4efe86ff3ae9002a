import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper.cli import submit as submit_command
from knnper.cli.app import app
from server.link import submission
from server.link.founding import Founding, found
from server.link.layout import FederationFolder
from server.run_folder import RunFolder
from server.settings import ServerSettings
from tests.apps.site_grid import experiment


def test_changes_reach_the_run_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []

    def submit(settings: ServerSettings, config: Mapping[str, str | bool]) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr(submission, "submit", submit)
    folder = FederationFolder(tmp_path / "fed")
    found(folder, Founding(["localhost"], insecure=True))
    RunFolder.create(tmp_path / "run", experiment())
    changes = ["data.path=a;b", "run.seed=7"]
    options = ["--server", str(folder.server_file), "--resume", str(tmp_path / "run")]
    for change in changes:
        options += ["--set", change]
    said = CliRunner().invoke(app, ["submit", *options, "--detach"])
    assert said.exit_code == 0, said.output
    assert json.loads(str(configs[0]["set"])) == changes


def test_who_waits_for_the_server_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(settings: ServerSettings, config: Mapping[str, str | bool]) -> int:
        time.sleep(0.3)
        return 7

    monkeypatch.setattr(submission, "submit", submit)
    monkeypatch.setattr(submit_command, "REMIND_S", 0.1)
    folder = FederationFolder(tmp_path / "fed")
    found(folder, Founding(["localhost"], insecure=True))
    RunFolder.create(tmp_path / "run", experiment())
    options = ["--server", str(folder.server_file), "--resume", str(tmp_path / "run")]
    said = CliRunner().invoke(app, ["submit", *options, "--detach"])
    assert said.exit_code == 0, said.output
    assert "Waiting for the server to take the run: 0 of at most 900 s" in said.output
