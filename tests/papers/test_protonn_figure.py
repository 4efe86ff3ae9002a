"""Prototypes in place of the store, at clients made by hand."""

from dataclasses import replace

import pytest
import torch

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.strategies.knn_per import KnnSettings
from papers.figures import PartRecord
from papers.memory import Embedded
from papers.protonn import (
    ClientSplits,
    ProtoNNFigureSettings,
    cells_of,
    completed,
    compress_client,
    paper_dims,
    points_of,
)

KEY = RandomKey(0)
SETTINGS = ProtoNNFigureSettings(capacity=(0.2, 1.0), dim=(2, 4), steps=5)
CELLS = cells_of(SETTINGS)
KNN = KnnSettings()


def blobs(count: int, seed: int) -> Embedded:
    """Return two far labels in four dimensions; the global model says always 0."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    embeddings = torch.randn(count, 4, generator=generator)
    embeddings[:, 0] += 20.0 * labels
    sure = torch.tensor([0.6, 0.4]).repeat(count, 1)
    return Embedded(embeddings, sure, labels)


def test_separable_labels_survive_compression() -> None:
    client = ClientSplits(blobs(30, 1), blobs(10, 2), blobs(20, 3))
    record = compress_client(client, CELLS, KNN, KEY)
    assert record["num_test"] == 20
    assert record["global_correct"] == 10
    # All right with the smallest λ that outvotes the global model.
    assert record["store"] == [20, 10, 0.3, 40 * (4 * 4 + 8)]
    assert [cell[:2] for cell in record["cells"]] == [[20, 10]] * 4
    # W is (d̂, 4), B (m, d̂) and Z (m, 2), with 40 examples to be remembered.
    sizes = [cell[3] for cell in record["cells"]]
    numbers = [(d * 4, m * d, m * 2) for d in (2, 4) for m in (8, 40)]
    assert all(
        size <= 4 * sum(parts) for size, parts in zip(sizes, numbers, strict=True)
    )


@pytest.mark.parametrize(("num_train", "num_validation"), [(0, 0), (0, 4), (3, 0)])
def test_without_evidence_it_is_global(num_train: int, num_validation: int) -> None:
    client = ClientSplits(blobs(num_train, 1), blobs(num_validation, 2), blobs(6, 3))
    record = compress_client(client, CELLS, KNN, KEY)
    measured = [record["store"], *record["cells"]]
    assert [one[:3] for one in measured] == [[3, 0, 0.0]] * 5


def test_the_same_key_gives_the_same_record() -> None:
    client = ClientSplits(blobs(9, 1), blobs(5, 2), blobs(6, 3))
    first = compress_client(client, CELLS, KNN, KEY)
    assert compress_client(client, CELLS, KNN, KEY) == first


def test_clients_are_pooled_by_their_images() -> None:
    one_cell = cells_of(replace(SETTINGS, capacity=(0.2,), dim=(2,)))

    def record(num_test: int, correct: int, weight: float) -> PartRecord:
        return {
            "num_test": num_test,
            "num_validation": 10,
            "global_correct": 1,
            "store": [correct, 5, weight, 100],
            "cells": [[correct - 1, 4, weight, 50]],
        }

    records = [record(3, 2, 0.5), record(5, 4, 1.0)]
    (cell, store), global_accuracy = points_of(records, one_cell)
    assert global_accuracy == 0.25
    assert store.accuracy == 0.75
    assert (cell.capacity, cell.projection_dim) == (0.2, 2)
    assert (cell.accuracy, cell.validation_accuracy) == (0.5, 0.4)
    assert (cell.mean_knn_weight, cell.mean_bytes) == (0.75, 50)
    with pytest.raises(RunError, match="found no test images at 1 clients"):
        points_of([{**record(0, 0, 0.0)}], one_cell)


def test_the_papers_dimensions_scale_with_the_embedding() -> None:
    assert paper_dims(1280) == (*range(100, 1300, 100), 1280)
    assert paper_dims(512) == (*range(40, 520, 40), 512)
    assert paper_dims(3) == (1, 2, 3)


def test_no_projection_to_more_dimensions() -> None:
    assert completed(ProtoNNFigureSettings(dim=(64, 1)), 64).dim == (1, 64)
    with pytest.raises(RunError, match="to 65 dimensions, expected at most 64"):
        completed(ProtoNNFigureSettings(dim=(4, 65)), 64)
