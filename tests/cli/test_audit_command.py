"""``knnper audit`` of a run and of a service."""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
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
from knnper.transport.credentials import issue_server_certificate, new_authority
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
def serving(client_file: Path) -> Iterator[int]:
    """Give the port of a client's service."""
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
    with running(service, replace(settings.service, port=0)) as address:
        yield int(address.rpartition(":")[2])


def with_port(client_file: Path, port: int) -> Path:
    """Write the file of a client with the port of its service."""
    document = yaml.safe_load(client_file.read_text())
    document["service"] = {**document.get("service", {}), "port": port}
    path = client_file.with_name(f"{port}.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def served_client(client_file: Path) -> Iterator[Path]:
    """Give the file of a client whose service runs."""
    with serving(client_file) as port:
        yield with_port(client_file, port)


def metrics_of(client_file: Path) -> str:
    settings = read_client(client_file)
    token = (settings.state / "token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    url = f"http://{settings.service.address}/metrics"
    return httpx.get(url, headers=headers).raise_for_status().text


@pytest.fixture
def record_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the record of a service's audit is written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "audit.json"


def results_by_attack(record_path: Path) -> dict[str, Any]:
    results = json.loads(record_path.read_bytes())["results"]
    return {result["attack"]: result for result in results}


def test_audit_of_a_service_finds_the_stored_examples(
    served_client: Path, record_path: Path
) -> None:
    result = run_command("audit", served_client)
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


def client_with_token(folder: Path, served_client: Path, secret: str) -> Path:
    """Return the file of a client without a model, with the port of another's service.

    ``secret``: its owner's token.
    """
    port = read_client(served_client).service.port
    path = with_port(write_client_file(folder, more="state: empty"), port)
    state = read_client(path).state
    state.mkdir()
    (state / "token").touch(mode=0o600)
    (state / "token").write_text(secret)
    return path


def test_audit_knows_a_service_by_its_certificate(
    client_file: Path, record_path: Path
) -> None:
    folder = client_file.parent
    for name in ("own", "other"):
        certificate = issue_server_certificate(new_authority("tests"), ["site.invalid"])
        certificate.write(folder / f"{name}.pem", folder / f"{name}.key")
    own, other = (
        f"{client_file.read_text()}service: "
        f"{{tls: {{certificate: {name}.pem, key: {name}.key}}}}\n"
        for name in ("own", "other")
    )
    client = folder / "encrypted.yaml"
    client.write_text(own)
    with serving(client) as port:
        result = run_command("audit", with_port(client, port), "--attack", "labels")
        client.write_text(other)
        refused = run_command("audit", with_port(client, port), "--attack", "labels")
    assert result.exit_code == 0, result.output
    assert results_by_attack(record_path)["labels"]["figures"]
    assert refused.exit_code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr


def test_audit_explains_an_unknown_token(served_client: Path, tmp_path: Path) -> None:
    unknown = "a token that the service does not know"
    result = run_command("audit", client_with_token(tmp_path, served_client, unknown))
    assert result.exit_code == 1
    assert "answered 401" in result.stderr


def test_audit_explains_a_service_of_another_client(
    served_client: Path, tmp_path: Path
) -> None:
    secret = (read_client(served_client).state / "token").read_text()
    result = run_command("audit", client_with_token(tmp_path, served_client, secret))
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
    with serving(private) as port:
        client = with_port(private, port)
        only_bound = run_command("audit", client, "--attack", "one_run")
        assert only_bound.exit_code == 0, only_bound.output
        assert "knnper_predictions_total{" not in metrics_of(client)
        result = run_command("audit", client)
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
    with serving(private) as port:
        result = run_command("audit", with_port(client_file, port))
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "with (ε, δ) = (2.0, 1e-05), expected" in message
    assert "with (ε, δ) = None;" in message


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{run}", "--shadow-models", "1"], 2, "1 is not in the range"),
        (["{run}", "--attack", "liar"], 2, "found 'liar'"),
        (["{run}/nothing"], 1, "nothing"),
        (["{file}"], 1, "expected a running"),
    ],
)
def test_audit_explains_wrong_arguments(
    run: Path, client_file: Path, arguments: list[str], code: int, message: str
) -> None:
    no_service = with_port(client_file, 9)
    filled = [text.format(run=run, file=no_service) for text in arguments]
    result = run_command("audit", *filled)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
