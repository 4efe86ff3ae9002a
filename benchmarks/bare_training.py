"""Training in plain torch: only a model, an optimizer and batches."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.bare_loop import BareImages, train
from benchmarks.bare_model import bare_images, bare_network
from benchmarks.workload import LEARNING_RATE, MOMENTUM, Workload
from knnper.process import compute_device, keep_freed_memory, prepare_process


@dataclass(frozen=True)
class TrainingShare:
    """The batches of one process in one pass."""

    workload: Workload
    batches: list[Tensor]  # positions of the images of each batch, int64 (batch,)
    keeps_memory: bool = False  # keep freed memory, as our workers do


def training_shares(workload: Workload, keeps_memory: bool) -> list[TrainingShare]:
    """Distribute all batches of a round over as many processes as there are workers."""
    batches = [
        torch.from_numpy(part.train[start : start + size])
        for part in workload.partition(workload.dataset()).clients
        for size in [min(workload.batch_size, len(part.train))]
        for start in range(0, len(part.train) - size + 1, size)
    ]
    count = workload.num_workers
    return [
        TrainingShare(workload, batches[number::count], keeps_memory)
        for number in range(count)
    ]


def train_share(share: TrainingShare) -> float:
    """Train this process's model on its share; return the last loss."""
    if share.keeps_memory:
        keep_freed_memory()
    model, optimizer, images = _resident(share.workload)
    return train(model, optimizer, images, share.batches)


@functools.lru_cache(maxsize=1)
def _resident(workload: Workload) -> tuple[nn.Module, SGD, BareImages]:
    """Build the state that this process keeps between passes."""
    data = workload.dataset()
    chosen = workload.experiment()
    device = compute_device(chosen.run)
    prepare_process(chosen.run, device)
    model = bare_network(chosen.model, data.spec).to(device)
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    images, _ = bare_images(data)
    return model, optimizer, images.to(device)
