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
    some_inputs,
    some_labels,
    tiny_model,
)

NUM_OWN, NUM_ROUNDS, NUM_QUERIES = 40, 60, 8
CLOSE = 1e-4


def named(count: int, seed: int) -> NamedExamples:
    examples = Examples(some_inputs(count, seed=seed), some_labels(count))
    return NamedExamples(examples, tuple(f"{seed}/{one}" for one in range(count)))


DATA = SiteData(
    named(NUM_OWN, 1), named(0, 2), named(0, 3), SiteTask(IMAGE, CLASSES, ())
)


@dataclass
class Journal:
    """What the store has gone through, in order, and what was answered."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    labels: dict[int, int] = field(default_factory=dict)
    names: dict[int, str | None] = field(default_factory=dict)
    states: list[frozenset[int]] = field(default_factory=list)
    answers: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def add(
        self, ids: Sequence[int], inputs: Tensor, labels: Tensor, names: Sequence[Any]
    ) -> None:
        for place, one in enumerate(ids):
            self.inputs[one] = inputs[place]
            self.labels[one] = int(labels[place])
            self.names[one] = names[place]
        before = self.states[-1] if self.states else frozenset()
        self.states.append(before | set(ids))

    def delete(self, ids: Sequence[int]) -> None:
        self.states.append(self.states[-1] - set(ids))


def served_from(state: Path, journal: Journal) -> Callable[[], ServedModel]:
    """Return what opens a model that notes what changes its store, in one thread."""

    def open_journaled() -> ServedModel:
        served = open_served(SiteState(state, "site-a"), writable=True)
        contents = served.store.contents()
        ids, labels = contents.ids, torch.from_numpy(contents.labels)
        names = served.store.external_ids(ids)
        journal.add(ids.tolist(), served.store.inputs(ids), labels, names)
        assert len(ids) == len(DATA.train)
        whole_add, whole_delete = served.add, served.delete

        def add(images: Tensor, labels: Tensor, names: Any = None) -> Added:
            added = whole_add(images, labels, names)
            journal.add(added.ids.tolist(), images, labels, names)
            return added

        def delete(selection: Selection) -> Ids:
            deleted = whole_delete(selection)
            journal.delete(deleted.tolist())
            return deleted

        served.add, served.delete = add, delete  # type: ignore[method-assign]
        return served

    return open_journaled


def add_examples(client: httpx.Client, seed: int) -> None:
    for number in range(NUM_ROUNDS):
        inputs = some_inputs(2, seed=1000 * seed + number)
        name, label = f"{seed}-{number}", number % 3
        sent = [
            {"input": one.tolist(), "label": label, "name": f"{name}-{at}"}
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
    queries = some_inputs(NUM_QUERIES, seed=5)
    number = 0
    while not stop.is_set():
        number = (number + 1) % NUM_QUERIES
        at_least = len(journal.states) - 1
        sent = {"inputs": [queries[number].tolist()]}
        answer = client.post("/predict", json=sent)
        assert answer.status_code == 200, answer.text
        journal.answers.append((number, at_least, answer.json()))


@pytest.mark.slow
def test_no_answer_is_wrong_or_mixed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    SiteState(state, "site-a").install(tiny_model(), DATA, took_part=False)
    journal, stop = Journal(), threading.Event()
    newer = tiny_model(seed=1)
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
    models = {one.fingerprint: one for one in (tiny_model(), newer)}
    assert last["model"] == newer.fingerprint
    assert last["store"]["num_stored"] == len(journal.states[-1])
    assert {answer["model"] for _, _, answer in journal.answers} == set(models)
    check = Checker(journal, models)
    for number, at_least, answer in journal.answers:
        check(number, at_least, answer)


class Checker:
    """Recomputes answers from all that was ever stored."""

    def __init__(self, journal: Journal, models: dict[str, GlobalModel]) -> None:
        self._journal = journal
        self._ids = sorted(journal.inputs)
        stored = torch.stack([journal.inputs[one] for one in self._ids])
        queries = some_inputs(NUM_QUERIES, seed=5)
        self._distances = {
            name: torch.cdist(
                model.embed(queries).double(), model.embed(stored).double()
            )
            for name, model in models.items()
        }
        self._alone = {
            name: model.head(model.embed(queries)) for name, model in models.items()
        }

    def __call__(self, number: int, at_least: int, answer: dict[str, Any]) -> None:
        prediction = answer["predictions"][0]
        self._require_one_state(number, at_least, answer)
        found = prediction["neighbors"]
        for one in found:
            assert one["label"] == self._journal.labels[one["id"]]
            assert one["name"] == self._journal.names[one["id"]]
        log_weights = KERNELS["paper"](
            torch.tensor([[one["distance"] ** 2 for one in found]]), 1.0, 0
        )
        labels = torch.tensor([[one["label"] for one in found]])
        votes = neighbor_vote(log_weights.double(), labels, len(CLASSES))[0]
        alone, weight = self._alone[answer["model"]][number], answer["knn_weight"]
        for said, expected in (
            ("knn_probabilities", votes),
            ("global_probabilities", alone),
            ("probabilities", weight * votes + (1 - weight) * alone),
        ):
            shares = torch.tensor(list(prediction[said].values()))
            assert torch.allclose(shares, expected.float(), atol=CLOSE)

    def _require_one_state(
        self, number: int, at_least: int, answer: dict[str, Any]
    ) -> None:
        """Require a state, no older than the question, whose nearest these are."""
        row = self._distances[answer["model"]][number]
        by_id = dict(zip(self._ids, row.tolist(), strict=True))
        found = answer["predictions"][0]["neighbors"]
        for one in found:
            assert one["distance"] == pytest.approx(by_id[one["id"]], abs=CLOSE)
        ids = {one["id"] for one in found}
        assert any(
            len(state) == answer["num_stored"]
            and ids <= state
            and _are_nearest(ids, state, by_id)
            for state in self._journal.states[at_least:]
        ), answer


def _are_nearest(ids: set[int], state: frozenset[int], by_id: dict[int, float]) -> bool:
    farthest = max(by_id[one] for one in ids)
    return all(by_id[other] > farthest - CLOSE for other in state - ids)
