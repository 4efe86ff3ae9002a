"""The benchmarked clients: as many as asked for, each of the size that is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.bare_loop import BareImages, train
from benchmarks.bare_model import bare_images, embed, mobilenet_v2
from benchmarks.bare_personalization import BareResult, personalize
from benchmarks.bare_training import training_shares
from benchmarks.workload import NUM_CLASSES, NUM_IMAGES, Workload
from knnper.data.examples import Dataset, LabelledArrays
from knnper.seeding import RandomKey
from knnper.simulation.workbench import Workbench, build_workbench, runtime_of
from knnper.strategies.core.evaluation import ClientResult
from knnper.strategies.core.records import ModelPayload

pytestmark = pytest.mark.integration

TINY = Workload(3, 4, 2, 5, model="tiny_cnn", embedding_dim=1)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return TINY.dataset()


@settings(max_examples=30, deadline=None)
@given(
    num_clients=st.integers(1, 40),
    sizes=st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(0, 900)),
)
def test_clients_have_their_sizes_and_no_image_twice(
    data: Dataset, num_clients: int, sizes: tuple[int, int, int]
) -> None:
    clients = Workload(num_clients, *sizes).partition(data).clients
    assert len(clients) == num_clients
    for client in clients:
        found = len(client.train), len(client.validation), len(client.test)
        assert found == sizes
        own = np.concatenate([client.train, client.validation])
        assert len(np.unique(own)) == len(own)
        assert len(np.unique(client.test)) == len(client.test)
        assert all(0 <= index < NUM_IMAGES for index in [*own, *client.test])


def test_images_are_coloured_and_the_same_in_every_process(data: Dataset) -> None:
    again = TINY.dataset()
    for split, twin in ((data.train, again.train), (data.test, again.test)):
        assert split.images.shape == (NUM_IMAGES, 32, 32, 3)
        assert set(split.labels.tolist()) == set(range(NUM_CLASSES))
        assert np.array_equal(split.images, twin.images)
        assert np.array_equal(split.labels, twin.labels)
    assert not np.array_equal(data.train.images, data.test.images)


# The bare loop is a fair baseline: it learns, in steps of the very same sizes.


def sizes_of_our_batches(workload: Workload) -> list[int]:
    """Train every client; return how many images each step saw."""
    bench = workload.workbench()
    sizes: list[int] = []

    def note(module: nn.Module, arguments: Any) -> None:
        sizes.append(len(arguments[0]))

    bench.task.model.module.register_forward_pre_hook(note)
    payload = ModelPayload(bench.task.initial_weights)
    for client in bench.roster.names():
        data = bench.clients.data(client)
        bench.method.client_update(payload, None, data, 1, RandomKey(0))
    return sizes


@pytest.mark.parametrize("num_train", [1, 7, 8, 15, 16, 25])
def test_batches_are_of_the_sizes_that_clients_train_on(num_train: int) -> None:
    workload = Workload(
        3, num_train, batch_size=8, model="tiny_cnn", embedding_dim=1, num_workers=2
    )
    batches = [
        batch
        for share in training_shares(workload, keeps_memory=False)
        for batch in share.batches
    ]
    assert sorted(map(len, batches)) == sorted(sizes_of_our_batches(workload))
    images = torch.cat(batches).tolist()
    assert len(set(images)) == len(images)


def test_the_loop_learns() -> None:
    labels = torch.arange(64) % 4
    pixels = (60 * labels).to(torch.uint8)[:, None, None, None].expand(64, 4, 4, 3)
    images = BareImages(pixels, labels, torch.full((3,), 1 / 64), torch.full((3,), -2))
    with RandomKey(0).torch():
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4)
        )
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = list(torch.split(torch.arange(64), 16))
    first = train(model, optimizer, images, batches[:1])
    last = train(model, optimizer, images, batches * 40)
    assert first > 1
    assert last < 0.1


def test_the_bare_model_is_ours() -> None:
    workload = Workload(1, 6)
    bench = workload.workbench()
    weights, ours = bench.task.initial_weights, bench.clients.data("0000").train
    bare = mobilenet_v2(10).eval()
    bare.load_state_dict(bare.state_dict() | bench.task.model.named(weights))
    images, _ = bare_images(workload.dataset())
    batch = images.batch(torch.arange(6))
    assert batch.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        same(bench.task.normalize(ours.images), batch)
        same(bench.task.embed(weights, ours.images), embed(bare, batch))
        same(bench.task.logits(weights, ours.images), bare(batch))


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Bare torch and FAISS find for each client what kNN-Per finds.


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
