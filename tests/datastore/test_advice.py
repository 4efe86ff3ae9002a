"""What is measured of each kind of index, and what is recommended."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.advice import (
    Advice,
    AdviceSettings,
    Trial,
    advise,
    recall,
    recommend,
)
from knnper.datastore.database import Rows
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.index import INDEX_KINDS, FlatSettings
from knnper.datastore.store import empty_memory_store

NUM_CLASSES, DIM = 3, 8


def clusters(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings of three classes that are far apart."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, NUM_CLASSES, count)
    centres = 20 * np.eye(NUM_CLASSES, DIM)
    vectors = centres[labels] + rng.normal(size=(count, DIM))
    return torch.from_numpy(vectors.astype(np.float32)), torch.from_numpy(labels)


def rows_of(embeddings: Tensor, labels: Tensor) -> Rows:
    store = empty_memory_store(StoreSpec(NUM_CLASSES), DIM, "first")
    store.add(NewExamples(embeddings, labels))
    return store._rows


@pytest.fixture(scope="module")
def advice() -> Advice:
    def head(embeddings: Tensor) -> Tensor:
        """Say class 0 of everything."""
        certain = torch.tensor([0.98, 0.01, 0.01])
        return certain.expand(len(embeddings), -1)

    rows = rows_of(*clusters(400))
    return advise(rows, NUM_CLASSES, AdviceSettings(num_neighbors=5), head)


def test_every_kind_is_measured(advice: Advice) -> None:
    titles = [one.title for one in advice.trials]
    assert titles[0] == "flat"
    assert set(INDEX_KINDS) <= set(titles)
    assert {"fp16, rerank 4", "sq8, rerank 4", "pq, rerank 4"} <= set(titles)
    assert (advice.num_examples, advice.num_asked) == (400, 80)
    assert advice.num_indexed == 400 - 80 - 40
    assert advice.global_accuracy is not None
    assert 0.2 < advice.global_accuracy < 0.5


def test_the_figures_are_right(advice: Advice) -> None:
    flat = advice.trials[0]
    assert flat.recall == 1.0
    assert flat.knn_accuracy == 1.0
    assert flat.mixed_accuracy == 1.0
    assert flat.knn_weight == 0.5  # the smallest that outweighs the head
    for trial in advice.trials:
        assert trial.knn_accuracy >= 0.99
        assert trial.recall > 0.9
        assert trial.query_ms > 0
        assert trial.build_s > 0
    assert {one.title: one.example_bytes for one in advice.trials}["sq8"] < (
        0.8 * flat.example_bytes
    )


def test_without_a_model_the_neighbours_vote_alone() -> None:
    counts = list[int]()
    found = advise(
        rows_of(*clusters(50)),
        NUM_CLASSES,
        AdviceSettings(),
        on_start=counts.append,
        on_progress=counts.append,
    )
    assert found.global_accuracy is None
    assert (found.num_indexed, found.num_asked) == (40, 10)
    assert {one.mixed_accuracy for one in found.trials} == {None}
    assert found.trials[0].accuracy == found.trials[0].knn_accuracy == 1.0
    assert counts == [len(found.trials)] + [1] * len(found.trials)


def test_the_split_is_that_of_the_seed() -> None:
    # One in ten labels is wrong, so which examples are asked for makes a difference.
    embeddings, labels = clusters(200)
    labels[::10] = (labels[::10] + 1) % NUM_CLASSES
    rows = rows_of(embeddings, labels)
    found = {
        seed: advise(rows, NUM_CLASSES, AdviceSettings(seed=seed)).trials[0].accuracy
        for seed in range(4)
    }
    again = advise(rows, NUM_CLASSES, AdviceSettings(seed=2)).trials[0].accuracy
    assert again == found[2]
    assert len(set(found.values())) > 1


@pytest.mark.parametrize("count", [0, 1, 9])
def test_few_examples_are_no_ground(count: int) -> None:
    found = advise(rows_of(*clusters(count)), NUM_CLASSES, AdviceSettings())
    assert found.trials == ()
    assert found.recommended == "flat"
    assert f"{count} examples are stored; at least 10" in found.reason


def test_ten_are_enough() -> None:
    found = advise(
        rows_of(*clusters(10)),
        NUM_CLASSES,
        AdviceSettings(),
        lambda x: torch.full((len(x), NUM_CLASSES), 1 / NUM_CLASSES),
    )
    assert (found.num_indexed, found.num_asked) == (7, 2)
    assert found.trials[0].recall == 1.0


def trial(title: str, accuracy: float, example_bytes: float, ms: float = 1.0) -> Trial:
    return Trial(
        title, FlatSettings(), accuracy, None, None, 1.0, example_bytes, ms, 1.0
    )


FLAT = trial("flat", 0.80, 2000)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "flat"),
        ([trial("half", 0.80, 1000)], "half"),
        ([trial("half", 0.796, 1000), trial("pq", 0.794, 64)], "half"),
        ([trial("pq", 0.796, 64), trial("half", 0.80, 1000)], "pq"),
        ([trial("slow", 0.80, 64, 9.0), trial("fast", 0.80, 64, 1.0)], "fast"),
        ([trial("graph", 0.85, 3000)], "flat"),
    ],
)
def test_the_recommendation(others: list[Trial], expected: str) -> None:
    title, reason = recommend([FLAT, *others], 100_000)
    assert title == expected
    assert "points" in reason


def test_a_small_index_stays_flat() -> None:
    title, reason = recommend([FLAT, trial("pq", 0.9, 64)], 8000)
    assert title == "flat"
    assert "16.0 MB" in reason
    assert recommend([FLAT, trial("pq", 0.9, 64)], 8001)[0] == "pq"
    # The mixture counts where there is one.
    worse = replace(trial("pq", 0.9, 64), mixed_accuracy=0.7)
    assert recommend([FLAT, worse], 100_000)[0] == "flat"
    found, nearest = np.array([[1, 2], [3, 4]]), np.array([[2, 1], [3, 5]])
    assert recall(found, nearest) == 0.75


def test_what_has_not_learnt_yet_is_told() -> None:
    found = advise(rows_of(*clusters(400)), NUM_CLASSES, AdviceSettings())
    learnt = {one.title: one.has_learnt for one in found.trials}
    assert not learnt["pq"]  # 1,024 are needed
    assert learnt["sq8"]  # 256 are
    assert learnt["flat"]
