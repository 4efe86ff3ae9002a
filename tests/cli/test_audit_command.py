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
    add_token,
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
    result = run_command(
        "audit",
        run,
        "--attacks",
        "lira,labels,analytic",
        "--shadow-models",
        2,
        "--json",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    record = json.loads((run / "audit.json").read_bytes())
    assert document == record
    assert (record["kind"], record["seed"], record["confidence"]) == ("run", 0, 0.95)
    assert record["environment"]["versions"]["knnper"]
    assert record["facts"]["method"] == "fedavg"
    assert record["facts"]["privacy"] == "null"
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


def results_by_attack(output: Path) -> dict[str, Any]:
    results = json.loads(output.read_bytes())["results"]
    return {result["attack"]: result for result in results}


def test_audit_of_a_service_finds_the_stored_examples(
    url: str, client_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "audit.json"
    result = run_command("audit", url, "--data", client_file, "--output", output)
    assert result.exit_code == 0, result.output
    results = results_by_attack(output)
    names = {"one_run", "labels", "probabilities", "neighbors", "waka"}
    assert set(results) == names
    assert "claim no privacy" in results["one_run"]["left_out"]
    # All examples of both kinds are queried: 200 digits, of which the test split is
    # not stored. A digit of the test split may equal a stored one, but none does.
    neighbors = results["neighbors"]
    assert sum(neighbors["samples"].values()) == 200
    assert neighbors["figures"]["auc"]["value"] == 1


def test_audit_with_a_token_makes_the_attacks_that_its_scopes_allow(
    url: str, client_file: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(add_token(read_client(client_file).state, "ward", ["predict"]))
    output = tmp_path / "audit.json"
    options = ("--data", client_file, "--token-file", token, "--output", output)
    assert run_command("audit", url, *options).exit_code == 0
    results = results_by_attack(output)
    assert results["labels"]["figures"]
    assert "lack the values" in results["neighbors"]["left_out"]
    assert results["waka"]["left_out"]


def test_audit_explains_an_unknown_token(
    url: str, client_file: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a token that the service does not know")
    result = run_command("audit", url, "--data", client_file, "--token-file", token)
    assert result.exit_code == 1
    assert "answered 401" in result.stderr


def test_audit_explains_a_service_of_another_client(
    url: str, client_file: Path, tmp_path: Path
) -> None:
    other = write_client_file(tmp_path, more="state: empty")
    (tmp_path / "token").write_text(
        (read_client(client_file).state / "token").read_text()
    )
    options = ("--data", other, "--token-file", tmp_path / "token")
    result = run_command("audit", url, *options)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "give the file of the client that serves there" in message


def test_audit_of_private_answers_bounds_their_epsilon(
    client_file: Path, tmp_path: Path
) -> None:
    private = client_file.with_name("private.yaml")
    private.write_text(
        client_file.read_text()
        + "service: {privacy: {epsilon: 4, threshold: 0.95, num_queries: 100}}\n"
    )
    output = tmp_path / "audit.json"
    options = ("--data", private, "--output", output)
    with serving(private) as url:
        only_bound = run_command("audit", url, *options, "--attacks", "one_run")
        assert only_bound.exit_code == 0, only_bound.output
        assert "knnper_predictions_total{" not in metrics_of(url, private)
        result = run_command("audit", url, *options)
    assert result.exit_code == 0, result.output
    facts = json.loads(output.read_bytes())["facts"]
    assert json.loads(facts["privacy"])["epsilon"] == 4
    results = results_by_attack(output)
    bound = results["one_run"]["epsilon"]
    assert 0 < bound["lower"] < bound["claimed"] == 4
    assert "lack the values" in results["neighbors"]["left_out"]
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
        (["{run}", "--data", "{file}"], 2, "neither --data nor --token-file"),
        (["{run}", "--shadow-models", "1"], 2, "1 is not in the range"),
        (["{run}", "--attacks", "liar"], 2, "found 'liar'"),
        (["{run}/nothing"], 1, "nothing"),
        (["http://127.0.0.1:9", "--data", "{file}"], 1, "expected a running"),
        (["http://[", "--data", "{file}"], 1, "expected a running"),
        (
            ["http://[", "--data", "{file}", "--token-file", "no-token"],
            1,
            "no-token: No such file",
        ),
    ],
)
def test_audit_explains_wrong_arguments(
    run: Path, client_file: Path, arguments: list[str], code: int, message: str
) -> None:
    filled = [text.format(run=run, file=client_file) for text in arguments]
    result = run_command("audit", *filled)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
