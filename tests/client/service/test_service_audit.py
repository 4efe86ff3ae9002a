"""Entries of a service in the audit log: changes of the memory, request counts."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from knnper.audit_log import AuditLog
from knnper.client.service import audit
from knnper.client.service.app import make_service
from knnper.client.service.tokens import Tokens, add_token, revoke_token
from knnper.datastore.examples import StoreBusyError
from tests.client.service.small_service import (
    TOKEN,
    SmallServed,
    running,
    small_served,
    some_inputs,
    wait_until_ready,
)

NAME, LABEL = "Zacharias.png", "eel"


def entries(state: Path) -> list[dict[str, Any]]:
    """Return the entries without their chain and time, oldest first."""
    chain = ("number", "time", "previous", "hash")
    return [
        {key: entry[key] for key in entry if key not in chain}
        for entry in AuditLog.of(state).entries()
    ]


def audited(served: SmallServed, state: Path, tokens: Tokens | None) -> ASGIApp:
    """Return a service that keeps an audit log in ``state``."""
    record = AuditLog.of(state).append
    return make_service("site-a", lambda: served, tokens=tokens, record=record)


@pytest.fixture
def served(tmp_path: Path) -> SmallServed:
    return small_served(tmp_path / "store")


@pytest.fixture
def client(tmp_path: Path, served: SmallServed) -> Iterator[httpx.Client]:
    app = audited(served, tmp_path, Tokens(tmp_path, TOKEN))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        running(app) as address,
        httpx.Client(base_url=address, headers=headers, timeout=30) as client,
    ):
        wait_until_ready(client)
        yield client


def added(client: httpx.Client, **headers: str) -> httpx.Response:
    example = {"input": some_inputs(1)[0].tolist(), "label": LABEL, "name": NAME}
    return client.post("/examples", json={"examples": [example]}, headers=headers)


def test_changes_of_memory_are_recorded_by_token(
    tmp_path: Path, client: httpx.Client
) -> None:
    secret = add_token(tmp_path, "tablet", ["add"])
    assert added(client, authorization=f"Bearer {secret}").status_code == 200
    body = {"names": [NAME]}
    assert client.request("DELETE", "/examples", json=body).status_code == 200
    revoke_token(tmp_path, "tablet")
    assert entries(tmp_path) == [
        {"event": "add_token", "token": "tablet", "scopes": ["add"]},
        {"event": "add_examples", "token": "tablet", "num_examples": 1},
        {"event": "delete_examples", "token": "owner", "num_examples": 1},
        {"event": "revoke_token", "token": "tablet"},
    ]
    text = AuditLog.of(tmp_path).path.read_text()
    for private in (secret, TOKEN, NAME, LABEL):
        assert private not in text


def test_change_is_recorded_before_it_is_made(
    tmp_path: Path,
    served: SmallServed,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*_: object) -> None:
        raise StoreBusyError(f"{NAME} is locked")

    monkeypatch.setattr(served, "add", busy)
    assert added(client).status_code == 503
    (entry,) = entries(tmp_path)
    assert entry["event"] == "add_examples"
    assert NAME not in AuditLog.of(tmp_path).path.read_text()


def test_requests_are_counted_until_the_service_ends(
    tmp_path: Path, served: SmallServed
) -> None:
    app = audited(served, tmp_path, Tokens(tmp_path, TOKEN))
    tablet = {"Authorization": f"Bearer {add_token(tmp_path, 'tablet', ['predict'])}"}
    owner = {"Authorization": f"Bearer {TOKEN}"}
    body = {"inputs": some_inputs(1).tolist()}
    with running(app) as address, httpx.Client(base_url=address, timeout=30) as client:
        wait_until_ready(client)
        for headers in (tablet, owner, owner, {"Authorization": "Bearer guessed"}):
            client.post("/predict", json=body, headers=headers)
        assert added(client, **tablet).status_code == 403
        client.request("BREW", f"/{NAME}", headers=owner)
    (counts,) = [entry for entry in entries(tmp_path) if entry["event"] == "requests"]
    counted = {
        request: count
        for request, count in counts["counts"].items()
        if "GET /ready" not in request
    }
    assert counted == {
        "tablet POST /predict 200": 1,
        "owner POST /predict 200": 2,
        "none POST other 401": 1,
        "tablet POST /examples 403": 1,
        "owner other other 404": 1,
    }


def test_damaged_log_stops_changes_and_not_predictions(
    tmp_path: Path, client: httpx.Client, served: SmallServed
) -> None:
    AuditLog.of(tmp_path).path.write_text("altered\n")
    num_stored = len(served.store)
    assert added(client).status_code == 503
    assert len(served.store) == num_stored
    body = {"inputs": some_inputs(1).tolist()}
    assert client.post("/predict", json=body).status_code == 200


def test_counts_are_written_while_the_service_runs(
    tmp_path: Path, served: SmallServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_EVERY_S", 0.02)
    app = audited(served, tmp_path, tokens=None)
    with running(app) as address, httpx.Client(base_url=address, timeout=30) as client:
        wait_until_ready(client)
        time.sleep(0.02)
        client.get("/ready")
        assert entries(tmp_path)
    requests = [request for entry in entries(tmp_path) for request in entry["counts"]]
    assert all(request.startswith("this machine ") for request in requests)


def test_counts_that_cannot_be_written_are_kept(tmp_path: Path) -> None:
    log = AuditLog.of(tmp_path)
    log.path.write_text("altered\n")
    counts = audit.RequestCounts(log.append)
    counts.count({}, "GET /info", 401)
    counts.record()
    log.path.unlink()
    counts.count({}, "GET /info", 401)
    counts.record()
    counts.record()
    (entry,) = entries(tmp_path)
    assert entry["counts"] == {"none GET /info 401": 2}
