"""A service starts before its model is there, follows newer ones, and stops."""

import asyncio
import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import Request
from starlette.types import Message
from torch import Tensor

from knnper.client.served_model import ServedModel, open_served
from knnper.client.service.app import make_service
from knnper.client.service.bodies import Bodies, Budget, RequestLimits
from knnper.client.service.errors import RequestError
from knnper.client.service.metrics import Metrics
from knnper.client.service.server import make_server, serve
from knnper.client.service.session import ModelWatcher, Workers
from knnper.client.service.tokens import Tokens
from knnper.client.settings import ServiceCertificate, ServiceSettings
from knnper.client.site_state import SiteState
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.datastore.examples import Added, Ids, Selection
from knnper.datastore.prediction import KERNELS, Prediction, neighbor_vote
from knnper.errors import KnnPerError, RunError
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    TOKEN,
    SmallServed,
    asking,
    predicted,
    running,
    small_served,
    some_inputs,
    some_labels,
    tiny_model,
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it took longer than ten seconds"
        time.sleep(0.01)


def test_a_service_without_a_model_waits_for_one(tmp_path: Path) -> None:
    served, is_installed = small_served(tmp_path / "store"), threading.Event()
    troubles = [OSError("a"), OSError("nothing is readable yet")]

    def open_served() -> SmallServed:
        if not is_installed.is_set():
            raise troubles.pop() if troubles else KnnPerError("nothing is installed")
        return served

    tokens, limits = Tokens(tmp_path, TOKEN), RequestLimits(poll_s=0.02)
    app = make_service("site-a", open_served, tokens=tokens, limits=limits)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"inputs": some_inputs(1).tolist()}
    with (
        running(app) as address,
        httpx.Client(base_url=address, headers=headers) as client,
    ):
        assert client.get("/health").json() == {"status": "ok"}
        until(lambda: "nothing is installed" in client.get("/ready").text)
        early = client.post("/predict", json=body)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert client.get("/info").status_code == 503
        assert client.get("/openapi.json").status_code == 200
        assert "knnper_ready 0.0" in client.get("/metrics").text
        is_installed.set()
        until(lambda: client.get("/ready").status_code == 200)
        assert client.post("/predict", json=body).status_code == 200
    assert served.is_closed


def test_a_full_queue_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = small_served(tmp_path / "store")
    goes_on, whole = threading.Event(), served.predict

    def slow(images: Tensor) -> Prediction:
        goes_on.wait(10)
        return whole(images)

    monkeypatch.setattr(served, "predict", slow)
    limits = RequestLimits(num_readers=1, max_waiting=1)
    body = {"inputs": some_inputs(1).tolist()}
    with asking(served, limits=limits) as client, ThreadPoolExecutor(3) as threads:
        requests = [
            threads.submit(client.post, "/predict", json=body) for _ in range(3)
        ]
        refused = next(as_completed(requests)).result()
        assert (refused.status_code, refused.json()["error"]) == (503, "unavailable")
        goes_on.set()
    assert sorted(request.result().status_code for request in requests) == [
        200,
        200,
        503,
    ]


def test_what_waited_too_long_is_not_done() -> None:
    async def ask() -> None:
        workers = Workers("test", 1, 10, timeout_s=0.05)
        goes_on, done = threading.Event(), list[str]()
        long = asyncio.create_task(workers.run(lambda: goes_on.wait(5), changes=True))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="waited"):
            await workers.run(lambda: done.append("late"))
        goes_on.set()
        # What has begun to change something is waited for.
        assert await long
        assert await workers.run(lambda: "next") == "next"
        workers.close()
        assert done == []

    asyncio.run(ask())


def test_what_takes_too_long_is_not_waited_for_and_blocks_no_other_thread() -> None:
    async def ask() -> None:
        workers = Workers("test", 2, 0, timeout_s=0.2)
        goes_on = threading.Event()

        def fail() -> None:
            goes_on.wait(5)
            raise ValueError("nobody waits for it")

        long = asyncio.create_task(workers.run(fail))
        await asyncio.sleep(0)
        assert await workers.run(lambda: "meanwhile") == "meanwhile"
        with pytest.raises(RequestError, match="took more") as refused:
            await long
        assert refused.value.status == 503
        # Its thread is still busy, and counted.
        other = asyncio.create_task(workers.run(lambda: goes_on.wait(5)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="2 requests"):
            await workers.run(lambda: None)
        goes_on.set()
        assert await other
        workers.close()

    asyncio.run(ask())


def test_inputs_that_a_slow_model_has_no_time_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = small_served(tmp_path / "store")
    whole, batch_sizes = served.predict, list[int]()

    def slow(images: Tensor) -> Prediction:
        batch_sizes.append(len(images))
        time.sleep(0.1 * len(images))
        return whole(images)

    monkeypatch.setattr(served, "predict", slow)
    with asking(served, limits=RequestLimits(seconds=0.95)) as client:
        # How fast it is was found out when the model was opened.
        until(lambda: len(batch_sizes) >= 3)
        body = {"inputs": some_inputs(10).tolist()}
        until(lambda: client.post("/predict", json=body).status_code == 413)
        batch_sizes.clear()
        answer = client.post("/predict", json=body)
    assert (answer.status_code, batch_sizes) == (413, [])
    assert "at most" in answer.json()["message"]
    # Nor is an image decoded once there is no time left.
    with pytest.raises(RequestError, match="decoded") as refused:
        Budget(RequestLimits(seconds=-1)).take_pixels(1, 1, 1)
    assert refused.value.status == 503


def test_bodies_have_so_much_memory_together() -> None:
    def request(size: int) -> Request:
        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(size)}

        return Request({"type": "http", "headers": []}, receive)

    async def send() -> None:
        bodies = Bodies(RequestLimits(max_request_bytes=100, max_held_bytes=120))
        async with bodies.read(request(80)):
            with pytest.raises(RequestError) as refused:
                async with bodies.read(request(80)):
                    pass
            assert refused.value.status == 503
            async with bodies.read(request(40)) as small:
                assert len(small.content) == 40
        async with bodies.read(request(80)) as later:
            assert len(later.content) == 80

    asyncio.run(send())


def test_a_body_that_does_not_arrive_is_not_waited_for(tmp_path: Path) -> None:
    limits = RequestLimits(body_grace_s=0.1)
    with asking(small_served(tmp_path / "store"), limits=limits) as client:
        place = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(place, timeout=10) as connection:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                b"Content-Type: application/json\r\n"
                + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            answer = connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in answer.lower()


def test_unusable_addresses_and_tls_files_are_refused(tmp_path: Path) -> None:
    app = make_service("site-a", lambda: small_served(tmp_path), tokens=None)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RunError, match=r"cannot listen at 127\.0\.0\.1"),
    ):
        serve(app, ServiceSettings(port=listener.getsockname()[1]), lambda _: None)
    nothing = tmp_path / "missing.pem"
    with pytest.raises(RunError, match="TLS cannot be used"):
        make_server(
            app, ServiceSettings(port=0, tls=ServiceCertificate(nothing, nothing))
        )


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        sqlite3.OperationalError("database or disk is full"),
        KnnPerError("the model is damaged"),
    ],
)
def test_what_goes_wrong_is_seen_and_tried_again(
    tmp_path: Path,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, looks = small_served(tmp_path / "store"), threading.Semaphore(0)
    errors: list[Exception] = []

    def refresh() -> bool:
        looks.release()
        if errors:
            raise errors[0]
        return False

    monkeypatch.setattr(served, "refresh", refresh)
    current = ModelWatcher(lambda: served, poll_s=0.005)
    metrics = Metrics(current)
    current.start()
    try:
        until(lambda: current.problem == "")
        assert b"knnper_following 1.0" in metrics.text()
        errors.append(error)
        until(lambda: str(error) in current.problem)
        assert current.served() is served, "it is served on"
        assert b"knnper_following 0.0" in metrics.text()
        assert b"knnper_ready 1.0" in metrics.text()
        for _ in range(10):
            assert looks.acquire(timeout=10), "it looks no longer"
        errors.clear()
        until(lambda: current.problem == "")
    finally:
        current.close()
    warnings = [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 1, "the same trouble is told once"
    assert (warnings[0].exc_info is None) == isinstance(error, KnnPerError)


def test_what_has_begun_is_finished_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = small_served(tmp_path / "store")
    begun, whole = threading.Event(), served.predict

    def slow(images: Tensor) -> Prediction:
        begun.set()
        time.sleep(0.5)
        return whole(images)

    with ThreadPoolExecutor(1) as threads:
        with asking(served) as client:
            monkeypatch.setattr(served, "predict", slow)
            url, headers = f"{client.base_url}/predict", client.headers
            body = {"inputs": some_inputs(2).tolist()}
            request = threads.submit(httpx.post, url, json=body, headers=headers)
            assert begun.wait(10)
        assert served.is_closed
    assert request.result().status_code == 200


NUM_OWN, NUM_ROUNDS, NUM_QUERIES = 40, 60, 8
CLOSE = 1e-4
QUERIES = some_inputs(NUM_QUERIES, seed=5)


def named(count: int, seed: int) -> NamedExamples:
    examples = Examples(some_inputs(count, seed=seed), some_labels(count))
    return NamedExamples(examples, tuple(f"{seed}/{number}" for number in range(count)))


TASK = SiteTask(IMAGE, CLASSES, ())
DATA = SiteData(named(NUM_OWN, 1), named(0, 2), named(0, 3), TASK)


@dataclass
class Journal:
    """What the store has gone through, in order, and what was answered."""

    examples: dict[int, tuple[Tensor, int, str | None]] = field(default_factory=dict)
    states: list[frozenset[int]] = field(default_factory=lambda: [frozenset()])
    answers: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def add(
        self, ids: Ids, inputs: Tensor, labels: Tensor, names: Sequence[Any]
    ) -> None:
        new = zip(inputs, labels.tolist(), names, strict=True)
        self.examples |= dict(zip(ids.tolist(), new, strict=True))
        self.states.append(self.states[-1] | set(ids.tolist()))


def served_from(state: Path, journal: Journal) -> Callable[[], ServedModel]:
    """Return what opens a model that notes what changes its store, in one thread."""

    def open_journaled() -> ServedModel:
        served = open_served(SiteState(state, "site-a"))
        contents = served.store.contents()
        ids, labels = contents.ids, torch.from_numpy(contents.labels)
        names = served.store.external_ids(ids)
        journal.add(ids, served.store.inputs(ids), labels, names)
        assert len(ids) == len(DATA.train)
        whole_add, whole_delete = served.add, served.delete

        def add(images: Tensor, labels: Tensor, names: Any = None) -> Added:
            added = whole_add(images, labels, names)
            journal.add(added.ids, images, labels, names)
            return added

        def delete(selection: Selection) -> Ids:
            deleted = whole_delete(selection)
            journal.states.append(journal.states[-1] - set(deleted.tolist()))
            return deleted

        served.add, served.delete = add, delete  # type: ignore[method-assign]
        return served

    return open_journaled


def add_examples(client: httpx.Client, seed: int) -> None:
    for number in range(NUM_ROUNDS):
        inputs = some_inputs(2, seed=1000 * seed + number).tolist()
        sent = [
            {"input": pixels, "label": number % 3, "name": f"{seed}-{number}-{at}"}
            for at, pixels in enumerate(inputs)
        ]
        answer = client.post("/examples", json={"examples": sent})
        assert answer.status_code == 200, answer.text


def delete_examples(client: httpx.Client) -> None:
    for number in range(NUM_ROUNDS):
        ids = [number + 1, NUM_OWN + 2 * number, NUM_OWN + 3 * number]
        answer = client.request("DELETE", "/examples", json={"ids": ids})
        assert answer.status_code == 200, answer.text


def ask(client: httpx.Client, journal: Journal, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number = (number + 1) % NUM_QUERIES
        at_least = len(journal.states) - 1
        answer = predicted(client, QUERIES[number].tolist())
        assert answer.status_code == 200, answer.text
        journal.answers.append((number, at_least, answer.json()))


@pytest.mark.slow
def test_no_answer_is_wrong_or_mixed(tmp_path: Path) -> None:
    state, journal, stop = tmp_path / "state", Journal(), threading.Event()
    first, newer = tiny_model(), tiny_model(seed=1)
    SiteState(state, "site-a").install(first, DATA, took_part=False)
    with (
        asking(served_from(state, journal)) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        futures = [threads.submit(ask, client, journal, stop) for _ in range(3)]
        changes = [
            threads.submit(add_examples, client, 1),
            threads.submit(add_examples, client, 2),
            threads.submit(delete_examples, client),
        ]
        try:
            # As another process does: the service finds it, and takes it up.
            SiteState(state, "site-a").install(newer, DATA, took_part=False)
            for change in changes:
                change.result()
        finally:
            stop.set()
        for future in futures:
            future.result()
        last = client.get("/info").json()
    assert last["model"] == newer.fingerprint
    assert last["store"]["num_stored"] == len(journal.states[-1])
    checks = {model.fingerprint: checker(journal, model) for model in (first, newer)}
    assert {answer["model"] for _, _, answer in journal.answers} == set(checks)
    for number, at_least, answer in journal.answers:
        checks[answer["model"]](number, at_least, answer)


def checker(
    journal: Journal, model: GlobalModel
) -> Callable[[int, int, dict[str, Any]], None]:
    """Return what recomputes answers of a model from all that was ever stored."""
    ids = sorted(journal.examples)
    stored = torch.stack([journal.examples[example_id][0] for example_id in ids])
    embedded, queries = model.embed(stored).double(), model.embed(QUERIES)
    distances = torch.cdist(queries.double(), embedded)
    alone = model.head(queries)

    def check(number: int, at_least: int, answer: dict[str, Any]) -> None:
        (prediction,) = answer["predictions"]
        neighbors, weight = prediction["neighbors"], answer["knn_weight"]
        by_id = dict(zip(ids, distances[number].tolist(), strict=True))
        for neighbor in neighbors:
            _, label, name = journal.examples[neighbor["id"]]
            assert (neighbor["label"], neighbor["name"]) == (label, name)
            assert neighbor["distance"] == pytest.approx(
                by_id[neighbor["id"]], abs=CLOSE
            )
        # There was a state, no older than the question, whose nearest these are.
        near = {neighbor["id"] for neighbor in neighbors}
        farthest = max(by_id[example_id] for example_id in near)
        assert any(
            len(state) == answer["num_stored"]
            and near <= state
            and all(by_id[other] > farthest - CLOSE for other in state - near)
            for state in journal.states[at_least:]
        ), answer
        squared = torch.tensor([[neighbor["distance"] ** 2 for neighbor in neighbors]])
        log_weights = KERNELS["paper"](squared, 1.0, 0).double()
        labels = torch.tensor([[neighbor["label"] for neighbor in neighbors]])
        votes = neighbor_vote(log_weights, labels, len(CLASSES))[0]
        for answered, expected in (
            ("knn_probabilities", votes),
            ("global_probabilities", alone[number]),
            ("probabilities", weight * votes + (1 - weight) * alone[number]),
        ):
            shares = torch.tensor(list(prediction[answered].values()))
            assert torch.allclose(shares, expected.float(), atol=CLOSE)

    return check
