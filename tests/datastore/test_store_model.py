"""Both forms of the store against a plain Python model, for every policy and index."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from knnper.datastore import index as ivf
from knnper.datastore import index as quantized
from knnper.datastore.examples import NewExamples, StoreFullError, StoreSpec
from knnper.datastore.index import (
    INDEX_KINDS,
    HalfSettings,
    IndexSettings,
    KindSettings,
    ListsSettings,
    ProductSettings,
    ScalarSettings,
)
from knnper.datastore.policy import POLICIES, StoreSettings
from knnper.datastore.store import empty_memory_store
from knnper.seeding import RandomKey
from tests.datastore.store_machine import INPUT_DIM, StoreMachine

COMBINATIONS = list(itertools.product(POLICIES, INDEX_KINDS))

LEARNT: dict[str, IndexSettings] = {
    "fp16, ranked anew": HalfSettings(rerank=2),
    "sq8": ScalarSettings(),
    "sq8, ranked anew": ScalarSettings(rerank=3),
    "pq": ProductSettings(num_bits=4),
    "pq, ranked anew": ProductSettings(num_bits=4, rerank=3),
    "ivf": ListsSettings(num_lists=3, num_probes=2),
}
"""Kinds that learn from the vectors, so that they have codes and lists soon."""


@pytest.fixture
def learning_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let indexes learn from 16 vectors, in place of hundreds."""
    monkeypatch.setattr(quantized, "_RANGE_SAMPLE", 16)
    monkeypatch.setattr(quantized, "_POINTS_PER_CENTROID", (1, 256))
    monkeypatch.setattr(ivf, "_FEWEST_IN_LIST", 4)


def run_histories(
    policy: str,
    index: KindSettings,
    num_histories: int,
    num_steps: int,
    capacity: int = 6,
) -> None:
    chosen = {"policy": policy, "index": index, "capacity": capacity}
    machine = type("Machine", (StoreMachine,), chosen)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        pytest.param(
            policy,
            kind,
            # The fast suite sees every policy, and every kind of index.
            marks=[] if policy == "fifo" or kind == "flat" else pytest.mark.slow,
        )
        for policy, kind in COMBINATIONS
    ],
)
def test_short_histories(policy: str, kind: str) -> None:
    run_histories(policy, INDEX_KINDS[kind](), 5, 20)


@pytest.mark.usefixtures("learning_early")
@pytest.mark.parametrize("policy", ["fifo", "reservoir"])
@pytest.mark.parametrize("name", LEARNT)
def test_short_histories_of_what_was_learnt(policy: str, name: str) -> None:
    run_histories(policy, LEARNT[name], 3, 20, capacity=24)


@pytest.mark.usefixtures("learning_early")
def test_these_histories_do_learn() -> None:
    vectors = RandomKey(1).numpy().normal(size=(24, INPUT_DIM)).astype("float32")
    for settings_ in LEARNT.values():
        built = settings_.build(INPUT_DIM, np.arange(24), vectors)
        flat = 24 * (4 * INPUT_DIM + 16)
        assert built.num_bytes != flat, settings_


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kind"), COMBINATIONS)
def test_long_histories(policy: str, kind: str) -> None:
    run_histories(policy, INDEX_KINDS[kind](), 30, 50)


@pytest.mark.slow
@pytest.mark.usefixtures("learning_early")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LEARNT)
def test_long_histories_of_what_was_learnt(policy: str, name: str) -> None:
    run_histories(policy, LEARNT[name], 15, 40, capacity=24)


def test_a_full_concatenating_store_refuses_a_batch_as_a_whole() -> None:
    settings_ = StoreSettings("concatenate", capacity=2)
    store = empty_memory_store(StoreSpec(2), 1, "model", settings_)
    store.add(NewExamples(torch.zeros(1, 1), torch.tensor([0])))
    with pytest.raises(StoreFullError, match="capacity"):
        store.add(NewExamples(torch.ones(2, 1), torch.tensor([0, 1])))
    assert store.contents().ids.tolist() == [1]
