import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.audit_log import AuditLog
from knnper.cli import fed_runs as submit_command
from knnper.cli.app import app
from knnper.cli.watching import Watch
from knnper.experiment_file import to_yaml
from knnper.server.link import doctor, registration, submission
from knnper.server.link.registration import RegisteredNode, RunStatus
from knnper.server.link.setup import FederationFolder, create_federation
from knnper.server.observer import Observer, RoundRecord
from knnper.server.run_folder import RunFolder
from knnper.server.settings import ServerSettings
from knnper.simulation.catalogue import over_sites
from knnper.transport.credentials import (
    fingerprint,
    new_node_key,
    read_node_key,
    read_public_key,
    replaced_keys,
    write_node_key,
)
from tests.apps.site_grid import experiment


@dataclass
class Operator:
    """Types commands on the server's machine; the server is one that seems to run."""

    folder: FederationFolder
    run: Path
    monkeypatch: pytest.MonkeyPatch
    configs: list[Mapping[str, str | bool]] = field(default_factory=list)

    def types(self, *words: object) -> Result:
        return CliRunner().invoke(app, ["fed", *map(str, words)])

    def submits(self, *words: object, of: Path | None = None) -> Result:
        return self.types("submit", of or self.folder.path, *words)

    def pretend(
        self,
        submit: Callable[[], int] = lambda: 7,
        nodes: Sequence[RegisteredNode] = (),
    ) -> None:
        """Let the server run, with its nodes, and take runs."""

        def noted(
            _: ServerSettings, config: Mapping[str, str | bool], apps: str
        ) -> int:
            self.configs.append(config)
            return submit()

        port = SimpleNamespace(nodes=lambda: list(nodes))
        opened = contextlib.nullcontext(port)
        self.monkeypatch.setattr(doctor, "is_running", lambda _: True)
        self.monkeypatch.setattr(registration, "control_port", lambda _: opened)
        self.monkeypatch.setattr(submission, "submit", noted)


@pytest.fixture(params=["insecure"])
def operator(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Operator:
    """Found a federation with a run that can be resumed."""
    folder = FederationFolder(tmp_path / "fed")
    create_federation(folder, ["localhost"], insecure=request.param == "insecure")
    RunFolder.create(tmp_path / "run", over_sites(experiment()))
    return Operator(folder, tmp_path / "run", monkeypatch)


with_keys = pytest.mark.parametrize("operator", ["with keys"], indirect=True)


def test_changes_reach_the_run_as_they_were_given(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit() -> int:
        time.sleep(0.3)
        return 7

    operator.pretend(submit)
    monkeypatch.setattr(submit_command, "REMIND_S", 0.1)
    changes = ["run.num_workers=3", "run.federation.stay_s=7"]
    options = [text for change in changes for text in ("--set", change)]
    result = operator.submits("--resume", operator.run, *options, "--detach")
    assert result.exit_code == 0, result.output
    assert json.loads(str(operator.configs[0]["set"])) == changes
    # Who waits for the server sees it.
    assert (
        "Waiting for the server to accept the run: 0 of at most 900 s" in result.output
    )


def test_interrupted_submission_names_the_command_that_lists_runs(
    operator: Operator,
) -> None:
    def submit() -> int:
        raise KeyboardInterrupt

    operator.pretend(submit)
    result = operator.submits("--resume", operator.run, "--detach")
    assert result.exit_code == 130
    assert "the server may have accepted the run" in result.output
    assert "flwr list federation" in " ".join(result.output.split())


def refused(result: Result, words: str) -> None:
    """Require the exit status of a usage error, and one line with its reason."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert re.search(words, line), line
    assert "\x1b" not in line
    assert "u001b" not in line
    assert result.stdout == ""


def test_a_server_that_does_not_run_is_not_asked(operator: Operator) -> None:
    result = operator.submits("--resume", operator.run)
    refused(result, f"is not running .* knnper fed server {operator.folder.path}$")


def test_invalid_run_is_refused_before_its_submission(
    operator: Operator, tmp_path: Path
) -> None:
    operator.pretend()
    file = tmp_path / "experiment.yaml"
    file.write_text(to_yaml(over_sites(experiment())))
    taken, simulated = tmp_path / "taken", tmp_path / "simulated"
    RunFolder.create(simulated, experiment())
    taken.mkdir()
    (taken / "thesis.txt").touch()
    new, again = [file, "--output", tmp_path / "new"], ["--resume", operator.run]
    for words, why in (
        ([tmp_path / "no.yaml"], "there is no such file"),
        ([*new, "--set", "method.name=fed_avg"], 'unknown name "fed_avg"'),
        ([*new, "--set", "model.weights=no.pt"], "model.weights: expected a readable"),
        ([file, "--output", taken], "is not empty and holds no run"),
        ([file, "--output", operator.run], "holds a run already"),
        (["--resume", tmp_path / "nowhere"], "holds no run"),
        (["--resume", simulated], "the run was simulated; resume it with knnper sim"),
        ([*again, "--set", "training.num_rounds=9"], "makes it another experiment"),
        ([*again, "--set", "run.nope=1"], "nope"),
    ):
        refused(operator.submits(*words), why)
    with RunFolder(operator.run).locked():
        refused(operator.submits(*again), "another process is at work on the run")
    assert operator.configs == []
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_refused_is_not_taken_back_to_a_round(
    operator: Operator,
) -> None:
    operator.pretend()
    kept = operator.run / "checkpoints" / "round-000002"
    kept.mkdir(parents=True)
    back = ("--from-round", 1, "--set", "training.num_rounds=9")
    refused(operator.submits("--resume", operator.run, *back), "another experiment")
    assert kept.is_dir()


@with_keys
def test_a_run_needs_as_many_clients_as_it_waits_for(operator: Operator) -> None:
    node = RegisteredNode("1", "site-a", "SHA256:a", "online")
    gone = RegisteredNode("2", "site-b", "SHA256:b", "unregistered")
    resume = ("--resume", operator.run, "--detach")
    operator.pretend(nodes=[gone])
    refused(operator.submits(*resume), "expected at least 1 client, found 0 registered")
    operator.pretend(nodes=[node, gone])
    two = ("--set", "run.federation.min_clients=2")
    refused(operator.submits(*resume, *two), "at least 2 clients, found 1 registered")
    assert operator.submits(*resume).exit_code == 0
    operator.pretend(nodes=[replace(node, status="offline")])
    result = operator.submits(*resume)
    assert result.exit_code == 0
    assert "0 of 1 client online; the run waits up to 5 s for 1" in result.stderr


@with_keys
def test_new_run_names_the_clients_that_it_waits_for(
    operator: Operator, tmp_path: Path
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(to_yaml(over_sites(experiment())))
    nodes = [RegisteredNode("1", "site-a", "SHA256:a", "online")]
    submitted = (file, "--output", tmp_path / "new", "--detach")
    operator.pretend(nodes=nodes)
    assert "online; the run waits" not in operator.submits(*submitted).stderr
    operator.pretend(
        nodes=[*nodes, RegisteredNode("2", "site-b", "SHA256:b", "offline")]
    )
    stderr = operator.submits(*submitted).stderr
    assert "1 of 2 clients online; the run waits up to 5 s for 2" in stderr
    assert (
        "offline: site-b. After that it begins with the clients that are online"
        in stderr
    )
    few = ("--set", "run.federation.min_clients=1")
    assert "online; the run waits" not in operator.submits(*submitted, *few).stderr


@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_that_failed_says_why_and_only_what_helps(
    operator: Operator, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.pretend()
    monkeypatch.setattr(submission, "why_ended", lambda *_: "no client came")
    ended = RunStatus("finished", outcome="failed")
    monkeypatch.setattr(submission, "status", lambda settings, run_id: ended)
    file = tmp_path / "experiment.yaml"
    file.write_text(to_yaml(over_sites(experiment())))
    start = ["--resume", operator.run] if resumes else [file, "--output", "nowhere"]
    result = operator.submits(*start)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    first, *more = lines[[line.startswith("Error") for line in lines].index(True) :]
    assert first == "Error: run 7 ended without results: no client came"
    # A run that never made its folder cannot be resumed.
    command = f"knnper fed submit {operator.folder.path} --resume {operator.run}"
    advice = [f"There is no checkpoint yet. To begin again: {command}"]
    assert more == (advice if resumes else [])


def test_every_command_takes_the_folder_or_the_file(operator: Operator) -> None:
    operator.pretend()
    folder = operator.folder
    for number, place in enumerate((folder.path, folder.server, folder.server_file)):
        added = operator.types("add-client", place, f"c{number}", "--host", "x")
        if place == folder.path or number:
            assert added.exit_code == 0, added.output
        for command in ("list", "status"):
            assert operator.types(command, place).exit_code == 0
        assert operator.types("doctor", place).exit_code in (0, 1)
        result = operator.submits("--resume", operator.run, "--detach", of=place)
        assert result.exit_code == 0, result.output
    assert len(list(folder.clients.iterdir())) == 3


def test_audit_log_has_submissions(operator: Operator) -> None:
    operator.pretend()
    submitted = operator.submits("--resume", operator.run, "--detach")
    assert submitted.exit_code == 0, submitted.output
    (entry,) = AuditLog.of(operator.folder.server / "state").entries()
    assert (entry["event"], entry["name"]) == ("submit_run", operator.run.name)
    assert entry["uid"] == os.getuid()
    shown = operator.types("audit", operator.folder.path)
    assert f"head: {entry['hash']}" in shown.stdout


def test_the_servers_part_alone_makes_no_clients(operator: Operator) -> None:
    alone = operator.folder.server.rename(operator.folder.path.parent / "elsewhere")
    for place in (alone, alone / "server.yaml"):
        result = operator.types("add-client", place, "site-a", "--host", "x")
        assert result.exit_code == 1
        assert "is the server's part of a federation alone" in result.stderr


@with_keys
def test_a_key_is_replaced(operator: Operator, tmp_path: Path) -> None:
    folder = operator.folder
    operator.types("add-client", folder.path, "site-a", "--num-train", 12)
    key, authorized = folder.client("site-a") / "site-a.key", folder.authorized
    old = fingerprint(read_node_key(key).public_key())
    for _ in range(2):
        result = operator.types("rotate-key", folder.path, "site-a")
        assert result.exit_code == 0, result.output
    new = fingerprint(read_node_key(key).public_key())
    assert new != old
    public = read_public_key(authorized / "site-a.pub")
    assert fingerprint(public) == new
    assert fingerprint(read_public_key(key.with_name("site-a.key.pub"))) == new
    assert old in replaced_keys(key)
    assert len(replaced_keys(key)) == 2
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert (authorized / "site-a.num_train").read_text() == "12\n"
    assert {one.name for one in authorized.iterdir()} == {
        "site-a.pub",
        "site-a.num_train",
    }
    # A key that the client has made itself.
    write_node_key(tmp_path / "own", new_node_key())
    public_file = tmp_path / "own.pub"
    own = operator.types("rotate-key", folder.server_file, "site-a", public_file)
    assert own.exit_code == 0, own.output
    known = (authorized / "site-a.pub").read_bytes()
    assert known == public_file.read_bytes()
    for words, why in (
        (["site-b"], "there is no client site-b"),
        (["site-a", public_file], "is already that of site-a"),
    ):
        wrong = operator.types("rotate-key", folder.path, *words)
        assert wrong.exit_code == 1
        assert why in wrong.stderr


def test_a_federation_without_keys_has_none_to_replace(operator: Operator) -> None:
    result = operator.types("rotate-key", operator.folder.path, "site-a")
    assert result.exit_code == 1
    assert "has no keys" in result.stderr


def test_the_status_is_a_snapshot(operator: Operator, tmp_path: Path) -> None:
    runs = operator.folder.server / "state" / "runs"
    stopped = RunFolder.create(runs / "first", over_sites(experiment()))
    record = {**a_round(2), "num_failed": 1, "failures": {"site-b": "out of memory"}}
    stopped.append_round(record)
    finished = RunFolder.create(runs / "second", over_sites(experiment()))
    finished.write_results({})
    (runs / "notes").mkdir()
    document = json.loads(
        operator.types("status", operator.folder.path, "--json").stdout
    )
    assert not document["server"]["is_running"]
    assert document["problems"] == []
    by_name = {run["name"]: run for run in document["runs"]}
    assert set(by_name) == {"first", "second"}
    assert by_name["first"]["state"] == "stopped"
    assert by_name["first"]["last_round"]["server_round"] == 2
    assert by_name["second"]["state"] == "finished"
    with stopped.locked():
        result = operator.types("status", operator.folder.path, "first", "--json")
        (only,) = json.loads(result.stdout)["runs"]
        assert (only["name"], only["state"], only["num_rounds_done"]) == (
            "first",
            "running",
            2,
        )
    shown = operator.types("status", operator.folder.path)
    assert shown.exit_code == 0
    assert "not running" in shown.stdout
    assert "first: round 2: client site-b failed: out of memory" in shown.stdout
    elsewhere = operator.types("status", operator.folder.path, operator.run)
    assert elsewhere.exit_code == 0
    nowhere = operator.types("status", operator.folder.path, "third")
    assert nowhere.exit_code == 1
    assert "third holds no run" in nowhere.stderr


def test_finished_run_that_is_led_is_staying(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = operator.folder.server / "state" / "runs"
    done = RunFolder.create(runs / "done", over_sites(experiment()))
    done.append_round(a_round(experiment().training.num_rounds))
    done.write_results({})
    RunFolder.create(runs / "next", over_sites(experiment()))
    monkeypatch.setattr(RunFolder, "is_led", lambda _: True)
    result = operator.types("status", operator.folder.path, "--json")
    states = {run["name"]: run["state"] for run in json.loads(result.stdout)["runs"]}
    assert states == {"done": "staying", "next": "running"}
    monkeypatch.setattr(Watch, "follow", lambda *_: False)
    monkeypatch.setattr(RunFolder, "is_finished", lambda run: run.path == done.path)
    followed = operator.types("status", operator.folder.path, "--follow")
    assert f"the run in {runs / 'next'} is not done" in followed.stderr


def test_the_run_under_way_is_followed(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = operator.folder.server / "state" / "runs"
    follow = ("status", operator.folder.path, "--follow")
    none = operator.types(*follow)
    assert none.exit_code == 1
    assert "expected one run under way" in none.stderr
    run = RunFolder.create(runs / "first", over_sites(experiment()))
    monkeypatch.setattr(RunFolder, "is_led", lambda _: True)
    monkeypatch.setattr(Watch, "follow", lambda *_: False)
    ended = operator.types(*follow)
    assert ended.exit_code == 1
    assert f"the run in {run.path} is not done" in ended.stderr
    wrong = operator.types(*follow, "--json")
    assert wrong.exit_code == 2


class RecordingObserver(Observer):
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
    observer = RecordingObserver()
    assert not Watch(folder.path).until_done(observer, lambda: True)
    assert observer.started == (2, 2)
    watch = Watch(folder.path)
    folder.write_results({"again": True})
    assert watch.until_done(observer, lambda: True)
    assert not Watch(tmp_path / "nowhere").until_done(observer, lambda: True)


def test_a_run_that_goes_back_is_followed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment())
    watch, observer, looks = Watch(folder.path), RecordingObserver(), 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            for number in (1, 2, 3):
                folder.append_round(a_round(number))
        if looks == 2:
            folder.drop_rounds_after(1)
        if looks == 3:
            folder.append_round({**a_round(2), "left_out": ["b", "c"]})
        return looks == 4

    assert not watch.until_done(observer, has_ended)
    assert observer.rounds == [1, 2, 3, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "the run went back to round 1, see its log",
        "round 2: clients left out: b, c",
    ]


def test_a_run_that_takes_the_place_of_another_is_followed_from_its_beginning(
    tmp_path: Path,
) -> None:
    before = RunFolder.create(tmp_path / "run", experiment())
    before.append_round(a_round(1))
    before.write_results({})
    watch, observer, looks = Watch(before.path), RecordingObserver(), 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            RunFolder.create(before.path, experiment(), overwrite=True)
        if looks == 2:
            before.append_round(a_round(1))
        return looks == 3

    assert not watch.until_done(observer, has_ended), "it has no results of its own"
    assert observer.started == (2, 1)
    assert observer.rounds == [1]
