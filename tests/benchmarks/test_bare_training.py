"""The bare loop is a fair baseline: it learns, in steps of the very same sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.bare_model import BareImages, bare_images, embed, mobilenet_v2
from benchmarks.bare_training import train, training_shares
from benchmarks.workload import Workload
from knnper.seeding import RandomKey
from knnper.strategies.core.records import ModelPayload


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


def test_processes_get_equal_shares() -> None:
    shares = training_shares(Workload(7, 10, num_workers=3), keeps_memory=False)
    assert [len(share.batches) for share in shares] == [3, 2, 2]


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
