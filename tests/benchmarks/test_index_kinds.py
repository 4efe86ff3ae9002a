"""The comparison of the kinds of index, on made-up embeddings."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.index_kinds import Embedded, build, kinds_to_compare, measure, recall
from knnper.datastore.index import INDEX_KINDS, FlatSettings, ListsSettings, Vectors


@pytest.fixture(name="data", scope="module")
def two_clouds() -> Embedded:
    """Return embeddings whose nearest neighbours have the same label."""
    rng = np.random.default_rng(0)

    def around(labels: NDArray[np.int64]) -> Vectors:
        noise = rng.normal(size=(len(labels), 8))
        return (10 * labels[:, None] + noise).astype(np.float32)

    labels, query_labels = np.arange(1700) % 2, np.arange(60) % 2
    return Embedded(around(labels), labels, around(query_labels), query_labels)


def test_recall_counts_what_was_found_in_the_same_row() -> None:
    expected = np.array([[1, 2], [3, 4]])
    assert recall(np.array([[2, 9], [4, 3]]), expected) == 0.75
    assert recall(np.array([[3, 4], [1, 2]]), expected) == 0


def test_flat_is_its_own_baseline(data: Embedded) -> None:
    (line,) = measure(data, [FlatSettings()], repetitions=1)
    document = json.loads(line.as_json())
    assert document["recall_at_10"] == 1
    assert document["accuracy"] == document["baseline_accuracy"] == 1
    assert document["bytes_per_vector"] == 4 * 8 + 16
    assert document["kind"] == {"name": "flat"}


def test_missed_neighbours_and_wrong_labels_show(data: Embedded) -> None:
    (line,) = measure(data, [ListsSettings(num_probes=1)], repetitions=1)
    assert 0.1 < json.loads(line.as_json())["recall_at_10"] < 1
    swapped = Embedded(data.vectors, 1 - data.labels, data.queries, data.query_labels)
    assert build(swapped, FlatSettings()).accuracy == 0
    names = {kind.name for kind in kinds_to_compare()}
    assert names == set(INDEX_KINDS) - {"flat"}
