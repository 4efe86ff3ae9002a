"""Adds, deletes, predictions and a newer model at once: no wrong or mixed answer."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from knnper.client.install import ServedModel, SiteState, open_served
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData, SiteTask
from knnper.datastore.examples import Added, Ids, Selection
from knnper.datastore.prediction import KERNELS, neighbor_vote
from knnper.strategies.core.exported_model import GlobalModel
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    asking,
    predicted,
    some_inputs,
    some_labels,
    tiny_model,
)

NUM_OWN, NUM_ROUNDS, NUM_QUERIES = 40, 60, 8
CLOSE = 1e-4
QUERIES = some_inputs(NUM_QUERIES, seed=5)


def named(count: int, seed: int) -> NamedExamples:
    examples = Examples(some_inputs(count, seed=seed), some_labels(count))
    return NamedExamples(examples, tuple(f"{seed}/{one}" for one in range(count)))


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
        served = open_served(SiteState(state, "site-a"), writable=True)
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
            {"input": one, "label": number % 3, "name": f"{seed}-{number}-{at}"}
            for at, one in enumerate(inputs)
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
        asked = [threads.submit(ask, client, journal, stop) for _ in range(3)]
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
        for one in asked:
            one.result()
        last = client.get("/info").json()
    assert last["model"] == newer.fingerprint
    assert last["store"]["num_stored"] == len(journal.states[-1])
    checks = {one.fingerprint: checker(journal, one) for one in (first, newer)}
    assert {answer["model"] for _, _, answer in journal.answers} == set(checks)
    for number, at_least, answer in journal.answers:
        checks[answer["model"]](number, at_least, answer)


def checker(
    journal: Journal, model: GlobalModel
) -> Callable[[int, int, dict[str, Any]], None]:
    """Return what recomputes answers of a model from all that was ever stored."""
    ids = sorted(journal.examples)
    stored = torch.stack([journal.examples[one][0] for one in ids])
    embedded, asked = model.embed(stored).double(), model.embed(QUERIES)
    distances = torch.cdist(asked.double(), embedded)
    alone = model.head(asked)

    def check(number: int, at_least: int, answer: dict[str, Any]) -> None:
        (prediction,) = answer["predictions"]
        found, weight = prediction["neighbors"], answer["knn_weight"]
        by_id = dict(zip(ids, distances[number].tolist(), strict=True))
        for one in found:
            _, label, name = journal.examples[one["id"]]
            assert (one["label"], one["name"]) == (label, name)
            assert one["distance"] == pytest.approx(by_id[one["id"]], abs=CLOSE)
        # There was a state, no older than the question, whose nearest these are.
        near = {one["id"] for one in found}
        farthest = max(by_id[one] for one in near)
        assert any(
            len(state) == answer["num_stored"]
            and near <= state
            and all(by_id[other] > farthest - CLOSE for other in state - near)
            for state in journal.states[at_least:]
        ), answer
        squared = torch.tensor([[one["distance"] ** 2 for one in found]])
        log_weights = KERNELS["paper"](squared, 1.0, 0).double()
        labels = torch.tensor([[one["label"] for one in found]])
        votes = neighbor_vote(log_weights, labels, len(CLASSES))[0]
        for said, expected in (
            ("knn_probabilities", votes),
            ("global_probabilities", alone[number]),
            ("probabilities", weight * votes + (1 - weight) * alone[number]),
        ):
            shares = torch.tensor(list(prediction[said].values()))
            assert torch.allclose(shares, expected.float(), atol=CLOSE)

    return check
