"""Bare torch and FAISS find for each client what kNN-Per finds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.bare_model import bare_images, mobilenet_v2
from benchmarks.bare_personalization import (
    BareResult,
    personalization_shares,
    personalize,
)
from benchmarks.workload import Workload
from knnper.data.examples import Dataset, LabelledArrays
from knnper.simulation.flower_engine import runtime_of
from knnper.simulation.workbench import Workbench, build_workbench
from knnper.strategies.core.predictors import ClientResult
from knnper.strategies.core.records import ModelPayload

WORKLOAD = Workload(6, 24, 10, 12, method="knn_per", num_workers=2)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    """Every other client has images that tell their labels."""
    random = WORKLOAD.dataset()
    data = Dataset(
        "tinted", tinted(random.train, 34), tinted(random.test, 12), random.spec, ()
    )
    partition = WORKLOAD.partition(data)
    return build_workbench(WORKLOAD.experiment(), data, partition, torch.device("cpu"))


@pytest.fixture(scope="module")
def weights(bench: Workbench) -> Tensor:
    """An untrained model whose head is sure of what it says, right or wrong."""
    sure = bench.task.initial_weights.clone()
    sure[bench.task.model.mask(lambda module: isinstance(module, nn.Linear))] *= 3000
    return sure


def tinted(split: LabelledArrays, images_per_client: int) -> LabelledArrays:
    """Give three labels, and paint the images of every other client in shades."""
    images, labels = split.images[:300].copy(), split.labels[:300] % 3
    told = np.arange(300) // images_per_client % 2 == 0
    shades = (100 * labels[told]).astype(np.uint8)[:, None, None, None]
    images[told] = images[told] // 8 + shades
    return LabelledArrays(images, labels)


def of_bare(bench: Workbench, weights: Tensor) -> list[BareResult]:
    model = mobilenet_v2(10)
    model.load_state_dict(model.state_dict() | bench.task.model.named(weights))
    train, test = bare_images(bench.clients.dataset)
    return personalize(model, train, test, bench.partition.clients)


def of_ours(bench: Workbench, weights: Tensor, folder: Path) -> list[ClientResult]:
    payload, runtime = ModelPayload(weights), runtime_of(bench, folder)
    names = bench.roster.names()
    rounds = [0] * len(names)
    return list(runtime.personalize(names, payload, payload, rounds).results)


def test_all_figures_agree(bench: Workbench, weights: Tensor, tmp_path: Path) -> None:
    ours, bare = of_ours(bench, weights, tmp_path), of_bare(bench, weights)
    assert [one.client for one in ours] == [one.client for one in bare]
    for one, other in zip(ours, bare, strict=True):
        assert one.chosen["knn_weight"] == other.knn_weight
        assert one.personal.accuracy == pytest.approx(other.personal)
        assert one.reference.accuracy == pytest.approx(other.reference)
        assert one.validation.accuracy == pytest.approx(other.validation)


def test_clients_differ(bench: Workbench, weights: Tensor) -> None:
    # Else any two implementations would agree.
    bare = of_bare(bench, weights)
    for name in ("knn_weight", "personal", "reference", "validation"):
        assert len({getattr(one, name) for one in bare}) > 1
    assert any(one.knn_weight > 0 and one.personal > one.reference for one in bare)


def test_each_client_has_one_process() -> None:
    shares = personalization_shares(WORKLOAD, "weights.safetensors")
    names = [[client.name for client in share.clients] for share in shares]
    assert names == [["0000", "0002", "0004"], ["0001", "0003", "0005"]]
