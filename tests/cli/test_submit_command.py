import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
