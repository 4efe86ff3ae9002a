"""``knnper audit`` of a run and of a service."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.client.served_model import open_served
from knnper.client.service.app import make_service
from knnper.client.service.bodies import RequestLimits
from knnper.client.service.tokens import (
    Tokens,
    read_or_create_owner_token,
)
from knnper.client.settings import read_client
from knnper.client.site_state import SiteState
from tests.cli.conftest import write_client_file
from tests.client.service.small_service import running

pytestmark = pytest.mark.integration


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_audit_of_a_run_writes_a_record_that_the_report_shows(run: Path) -> None:
    attacks = ("--attack", "lira", "--attack", "labels", "--attack", "analytic")
    result = run_command("audit", run, *attacks, "--shadow-models", 2)
    assert result.exit_code == 0, result.output
    record = json.loads((run / "audit.json").read_bytes())
    assert (record["seed"], record["confidence"]) == (0, 0.95)
    assert record["environment"]["versions"]["knnper"]
    experiment = record["facts"]["experiment"]
    assert experiment["method"]["name"] == "fedavg"
    assert experiment["privacy"] is None
    lira, labels, analytic = record["results"]
    assert lira["samples"]["members"] > lira["samples"]["others"] > 100
    assert lira["figures"]["auc"]["low"] < 0.6
    assert labels["left_out"] == "the clients of the run have no memory"
    assert "no linear layer" in analytic["left_out"]

    shown = run_command("report", run, "--markdown")
    assert shown.exit_code == 0, shown.output
    assert "## Audit" in shown.stdout
    assert "not possible: the clients of the run have no memory" in shown.stdout
    (run / "audit.json").write_text("{")
    damaged = run_command("report", run, "--markdown")
    assert damaged.exit_code == 1
    assert "cannot be read as a record of an audit" in damaged.stderr
    (run / "audit.json").unlink()


@pytest.fixture(scope="module")
def client_file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert run_command("fed", "export", run, folder / "model").exit_code == 0
    path = write_client_file(folder, more="state: kept")
    model = ("--model", folder / "model")
    result = run_command("site", "onboard", path, *model, "--no-serve")
    assert result.exit_code == 0, result.output
    return path


@contextlib.contextmanager
def serving(client_file: Path) -> Iterator[str]:
    settings = read_client(client_file)
    owner = read_or_create_owner_token(settings.state / "token")
    privacy = settings.service.privacy
    site_state = SiteState(settings.state, settings.name)
    service = make_service(
        settings.name,
        functools.partial(open_served, site_state, privacy),
        tokens=Tokens(settings.state, owner),
        limits=RequestLimits(poll_s=0.05),
        privacy=privacy,
    )
    with running(service) as address:
        yield address


@pytest.fixture
def url(client_file: Path) -> Iterator[str]:
    with serving(client_file) as address:
        yield address


def metrics_of(url: str, client_file: Path) -> str:
    token = (read_client(client_file).state / "token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    return httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text


@pytest.fixture
def record_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the record of a service's audit is written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "audit.json"


def results_by_attack(record_path: Path) -> dict[str, Any]:
    results = json.loads(record_path.read_bytes())["results"]
    return {result["attack"]: result for result in results}


def test_audit_of_a_service_finds_the_stored_examples(
    url: str, client_file: Path, record_path: Path
) -> None:
    result = run_command("audit", url, "--data", client_file)
    assert result.exit_code == 0, result.output
    results = results_by_attack(record_path)
    names = {"one_run", "labels", "probabilities", "neighbors", "waka"}
    assert set(results) == names
    assert "claim no privacy" in results["one_run"]["left_out"]
    # All examples of both kinds are queried: 200 digits, of which the test split is
    # not stored. A digit of the test split may equal a stored one, but none does.
    neighbors = results["neighbors"]
    assert sum(neighbors["samples"].values()) == 200
    assert neighbors["figures"]["auc"]["value"] == 1


def client_with_token(folder: Path, secret: str) -> Path:
    """Return the file of a client without a model, with this token of the owner."""
    path = write_client_file(folder, more="state: empty")
    state = read_client(path).state
    state.mkdir()
    (state / "token").touch(mode=0o600)
    (state / "token").write_text(secret)
    return path


def test_audit_explains_an_unknown_token(url: str, tmp_path: Path) -> None:
    other = client_with_token(tmp_path, "a token that the service does not know")
    result = run_command("audit", url, "--data", other)
    assert result.exit_code == 1
    assert "answered 401" in result.stderr


def test_audit_explains_a_service_of_another_client(
    url: str, client_file: Path, tmp_path: Path
) -> None:
    secret = (read_client(client_file).state / "token").read_text()
    other = client_with_token(tmp_path, secret)
    result = run_command("audit", url, "--data", other)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "give the file of the client that serves there" in message


def test_audit_of_private_answers_bounds_their_epsilon(
    client_file: Path, record_path: Path
) -> None:
    private = client_file.with_name("private.yaml")
    private.write_text(
        client_file.read_text()
        + "service: {privacy: {epsilon: 4, threshold: 0.95, num_queries: 100}}\n"
    )
    options = ("--data", private)
    with serving(private) as url:
        only_bound = run_command("audit", url, *options, "--attack", "one_run")
        assert only_bound.exit_code == 0, only_bound.output
        assert "knnper_predictions_total{" not in metrics_of(url, private)
        result = run_command("audit", url, *options)
    assert result.exit_code == 0, result.output
    facts = json.loads(record_path.read_bytes())["facts"]
    assert facts["privacy"]["epsilon"] == 4
    results = results_by_attack(record_path)
    bound = results["one_run"]["epsilon"]
    assert 0 < bound["lower"] < bound["claimed"] == 4
    assert "service.privacy withholds" in results["neighbors"]["left_out"]
    assert results["probabilities"]["figures"]["auc"]["value"] < 0.9


def test_audit_explains_privacy_that_the_file_does_not_have(
    client_file: Path,
) -> None:
    private = client_file.with_name("stricter.yaml")
    private.write_text(
        client_file.read_text() + "service: {privacy: {epsilon: 2, threshold: 0.9}}\n"
    )
    with serving(private) as url:
        result = run_command("audit", url, "--data", client_file)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "with (ε, δ) = (2.0, 1e-05), expected" in message
    assert "with (ε, δ) = None;" in message


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["http://127.0.0.1:9"], 2, "a URL goes with --data CLIENT.yaml"),
        (["{run}", "--data", "{file}"], 2, "a URL goes with --data CLIENT.yaml"),
        (["{run}", "--shadow-models", "1"], 2, "1 is not in the range"),
        (["{run}", "--attack", "liar"], 2, "found 'liar'"),
        (["{run}/nothing"], 1, "nothing"),
        (["http://127.0.0.1:9", "--data", "{file}"], 1, "expected a running"),
        (["http://[", "--data", "{file}"], 1, "expected a running"),
    ],
)
def test_audit_explains_wrong_arguments(
    run: Path, client_file: Path, arguments: list[str], code: int, message: str
) -> None:
    filled = [text.format(run=run, file=client_file) for text in arguments]
    result = run_command("audit", *filled)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
