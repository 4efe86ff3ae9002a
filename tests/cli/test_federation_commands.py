import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.errors import RunError
from knnper.server.link import submission
from knnper.server.link.registration import RunStatus
from knnper.server.link.setup import FederationFolder, found
from knnper.server.observer import Observer, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.server.settings import ServerSettings
from knnper_cli import federation as submit_command
from knnper_cli.app import app
from knnper_cli.watching import Watch
from tests.apps.site_grid import experiment


@pytest.fixture
def federation(tmp_path: Path) -> list[str]:
    """Found a federation with a run to resume; return the options that name both."""
    folder = FederationFolder(tmp_path / "fed")
    found(folder, ["localhost"], insecure=True)
    RunFolder.create(tmp_path / "run", experiment())
    return ["--server", str(folder.server_file), "--resume", str(tmp_path / "run")]


def submitted(
    federation: list[str],
    monkeypatch: pytest.MonkeyPatch,
    submit: Callable[..., int],
    *options: str,
) -> Result:
    monkeypatch.setattr(submission, "submit", submit)
    return CliRunner().invoke(app, ["fed", "submit", *federation, *options])


def test_changes_reach_the_run_as_they_were_given(
    federation: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Mapping[str, str | bool]] = []

    def submit(settings: ServerSettings, config: Mapping[str, str | bool]) -> int:
        configs.append(config)
        time.sleep(0.3)
        return 7

    monkeypatch.setattr(submit_command, "REMIND_S", 0.1)
    changes = ["data.path=a;b", "run.seed=7"]
    options = [text for change in changes for text in ("--set", change)]
    said = submitted(federation, monkeypatch, submit, *options, "--detach")
    assert said.exit_code == 0, said.output
    assert json.loads(str(configs[0]["set"])) == changes
    # Who waits for the server sees it.
    assert "Waiting for the server to take the run: 0 of at most 900 s" in said.output


def test_who_no_longer_waits_is_told_where_to_look(
    federation: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> int:
        raise KeyboardInterrupt

    said = submitted(federation, monkeypatch, submit, "--detach")
    assert said.exit_code == 130
    assert "the server may have taken the run" in said.output
    assert "flwr list federation" in " ".join(said.output.split())


def test_a_log_that_cannot_be_shown_does_not_hide_how_a_run_ended(
    federation: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_words(*_: object) -> str:
        raise RunError("flwr log did not end within 120 s")

    ended = RunStatus("finished", outcome="failed", details="out of memory")
    monkeypatch.setattr(submission, "status", lambda settings, run_id: ended)
    monkeypatch.setattr(submission, "last_words", last_words)
    said = submitted(federation, monkeypatch, lambda *_: 7)
    assert said.exit_code == 1
    assert "run 7 ended without results: failed out of memory" in said.output
    assert "cannot be shown: flwr log did not end within 120 s" in said.output


class Told(Observer):
    def __init__(self) -> None:
        self.started: tuple[int, int] | None = None
        self.rounds: list[int | float] = []

    def training_started(self, num_rounds: int, first_round: int) -> None:
        self.started = num_rounds, first_round

    def round_finished(self, record: RoundRecord) -> None:
        assert isinstance(record["train_loss"], float)
        self.rounds.append(record["server_round"])


def a_round(number: int) -> RoundRecord:
    return {"server_round": number, "train_loss": float("nan"), "num_clients": 3}


def test_results_from_before_do_not_count(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment())
    folder.append_round(a_round(1))
    folder.write_results({})
    told = Told()
    assert not Watch(folder.path).until_done(told, lambda: True)
    assert told.started == (2, 2)
    watch = Watch(folder.path)
    folder.write_results({"again": True})
    assert watch.until_done(told, lambda: True)
    assert not Watch(tmp_path / "nowhere").until_done(told, lambda: True)


def test_a_run_that_takes_the_place_of_another_is_followed_from_its_beginning(
    tmp_path: Path,
) -> None:
    before = RunFolder.create(tmp_path / "run", experiment())
    before.append_round(a_round(1))
    before.write_results({})
    watch, told, looks = Watch(before.path), Told(), 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            RunFolder.create(before.path, experiment(), overwrite=True)
        if looks == 2:
            before.append_round(a_round(1))
        return looks == 3

    assert not watch.until_done(told, has_ended), "it has no results of its own"
    assert told.started == (2, 1)
    assert told.rounds == [1]
