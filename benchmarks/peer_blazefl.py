"""BlazeFL as a contender of `benchmarks.peers`, in an environment that has it.

Its loop: sample, send, train in a pool of threads (as its README recommends), load the
results. Users of BlazeFL write handler and trainer: our clients run the bare loop, each
thread with its own network, and the handler keeps a running sum.
"""

import copy
import queue
import threading
from dataclasses import replace
from typing import Any

import torch
from blazefl.core import BaseServerHandler, ThreadPoolClientTrainer
from torch import Tensor, nn

from benchmarks.peer_process import PeerTask, serve, task_folder

NUM_THREADS = 2

State = list[Tensor]
"""A network's floating-point tensors, in the order of its ``state_dict``."""

Trained = tuple[int, State]
"""Number of steps of a client, and its network after them."""


class _Handler(BaseServerHandler[Trained, State]):  # type: ignore[misc]
    def __init__(self, task: PeerTask) -> None:
        self._task, self._first = task, 0
        self._begin()

    def sample_clients(self) -> list[int]:
        count = len(self._task.clients)
        first = self._first
        self._first += self._task.cohort_size
        return [number % count for number in range(first, self._first)]

    def downlink_package(self) -> State:
        return _state(self._task.network)

    def load(self, payload: Trained) -> bool:
        for total, tensor in zip(self._sum, payload[1], strict=True):
            total += tensor
        self._num_loaded += 1
        is_last = self._num_loaded == self._task.cohort_size
        if is_last:
            self.global_update([])
        return is_last

    def global_update(self, buffer: list[Trained]) -> None:  # noqa: ARG002
        for tensor, total in zip(_state(self._task.network), self._sum, strict=True):
            tensor.copy_(total / self._num_loaded)
        self._begin()

    def _begin(self) -> None:
        self._sum = [torch.zeros_like(tensor) for tensor in _state(self._task.network)]
        self._num_loaded = 0


class _Trainer(ThreadPoolClientTrainer[Trained, State]):  # type: ignore[misc]
    def __init__(self, task: PeerTask) -> None:
        self.num_parallels, self.device, self.device_count = NUM_THREADS, "cpu", 0
        self.cache: list[Trained] = []
        self.stop_event = threading.Event()
        self._idle: queue.SimpleQueue[PeerTask] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            self._idle.put(replace(task, network=copy.deepcopy(task.network)))

    def worker(self, cid: int, device: str, payload: State, stop_event: Any) -> Trained:  # noqa: ARG002
        network = self._idle.get()
        for tensor, sent in zip(_state(network.network), payload, strict=True):
            tensor.copy_(sent)
        num_steps = network.train(cid)
        trained = [tensor.clone() for tensor in _state(network.network)]
        self._idle.put(network)
        return num_steps, trained

    def uplink_package(self) -> list[Trained]:
        packages, self.cache = self.cache, []
        return packages


def _state(network: nn.Module) -> State:
    tensors = network.state_dict().values()
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def main(task: PeerTask) -> None:
    """Make rounds on request."""
    handler, trainer = _Handler(task), _Trainer(task)

    def make_round() -> int:
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        packages = trainer.uplink_package()
        for package in packages:
            handler.load(package)
        return sum(num_steps for num_steps, _ in packages)

    serve(make_round, task.network.state_dict)


if __name__ == "__main__":
    main(PeerTask.load(task_folder(__doc__)))
