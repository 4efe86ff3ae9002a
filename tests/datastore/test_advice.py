from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.advice import (
    Trial,
    advise,
    recall,
    recommend,
)
from knnper.datastore.database import Rows
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.index import INDEX_KINDS, FlatSettings
from knnper.datastore.memory import KnnSettings
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


def test_every_kind_is_measured() -> None:
    def says_class_0(embeddings: Tensor) -> Tensor:
        return torch.tensor([0.98, 0.01, 0.01]).expand(len(embeddings), -1)

    rows, settings = rows_of(*clusters(400)), KnnSettings(num_neighbors=5)
    advice = advise(rows, NUM_CLASSES, settings, says_class_0)
    titles = [one.title for one in advice.trials]
    assert titles[0] == "flat"
    assert set(INDEX_KINDS) <= set(titles)
    assert {"fp16, rerank 4", "sq8, rerank 4", "pq, rerank 4"} <= set(titles)
    assert (advice.num_examples, advice.num_asked) == (400, 80)
    assert advice.num_indexed == 400 - 80 - 40
    assert advice.global_accuracy is not None
    assert 0.2 < advice.global_accuracy < 0.5
    flat = advice.trials[0]
    assert flat.recall == flat.knn_accuracy == flat.mixed_accuracy == 1.0
    assert flat.knn_weight == 0.5  # the smallest that outweighs the head
    for trial in advice.trials:
        assert trial.knn_accuracy >= 0.99
        assert trial.recall > 0.9
        assert min(trial.query_ms, trial.build_s) > 0
    named = {one.title: one for one in advice.trials}
    assert named["sq8"].example_bytes < 0.8 * flat.example_bytes
    # 1,024 are needed to learn product codes, 256 to learn scalar ones.
    assert not named["pq"].has_learnt
    assert named["sq8"].has_learnt
    assert flat.has_learnt


def test_without_a_model_the_neighbours_vote_alone() -> None:
    counts = list[int]()
    rows, told = rows_of(*clusters(50)), counts.append
    found = advise(rows, NUM_CLASSES, KnnSettings(), None, told, told)
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
        seed: advise(rows, NUM_CLASSES, KnnSettings(), seed=seed).trials[0].accuracy
        for seed in range(4)
    }
    again = advise(rows, NUM_CLASSES, KnnSettings(), seed=2).trials[0].accuracy
    assert again == found[2]
    assert len(set(found.values())) > 1


def test_fewer_than_ten_examples_are_no_ground() -> None:
    for count in (0, 9):
        found = advise(rows_of(*clusters(count)), NUM_CLASSES, KnnSettings())
        assert (found.trials, found.recommended) == ((), "flat")
        assert f"{count} examples are stored; at least 10" in found.reason
    even = torch.full((1, NUM_CLASSES), 1 / NUM_CLASSES)
    rows = rows_of(*clusters(10))
    found = advise(rows, NUM_CLASSES, KnnSettings(), lambda x: even.expand(len(x), -1))
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
