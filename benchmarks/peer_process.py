"""Common parts of the contenders of `benchmarks.peers`; needs only torch.

A contender is one process or several. For each line on its standard input, a process
takes part in a round of federated averaging, or writes the global model, and answers
with its number of SGD steps.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.bare_loop import BareImages, train

TASK_FILE = "task.pt"
ROUND = "round"
"""Line that requests a round; any other line is the path for the global model."""

Model = Callable[[], dict[str, Tensor]]
"""Returns the global model under the names of the task's network; None without one."""


@dataclass(frozen=True)
class PeerTask:
    """The training task of all contenders, one epoch per round."""

    network: nn.Module  # before the first round; from normalised images to logits
    images: BareImages  # of all clients
    clients: Tensor  # positions of each client's images, int64 (clients, images)
    cohort_size: int  # clients per round
    batch_size: int  # divides the number of images of a client
    learning_rate: float
    momentum: float

    @property
    def steps_per_client(self) -> int:
        """SGD steps of a client in a round."""
        return self.clients.shape[1] // self.batch_size

    def save(self, folder: Path) -> None:
        """Write the task for the contenders."""
        torch.save({**vars(self), "images": vars(self.images)}, folder / TASK_FILE)

    @classmethod
    def load(cls, folder: Path) -> "PeerTask":
        """Read a task written by `save`, including the whole network."""
        # The network is a traced module, not only tensors; the benchmark that runs this
        # process has written the file itself.
        fields = torch.load(folder / TASK_FILE, mmap=True, weights_only=False)
        return cls(**{**fields, "images": BareImages(**fields["images"])})

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> SGD:
        """Return the optimizer of local training."""
        return SGD(parameters, lr=lr, momentum=self.momentum)

    def train(self, client: int) -> int:
        """Train `network` on a client's images; return the number of steps."""
        batches = torch.split(self.clients[client], self.batch_size)
        optimizer = self.optimizer(self.network.parameters(), self.learning_rate)
        train(self.network, optimizer, self.images, batches)
        return len(batches)


class Line:
    """Pipes to `benchmarks.peers`; other output goes to stderr."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Wait for the next request; return False at the end."""
        while line := sys.stdin.readline().rstrip("\n"):
            if line == ROUND:
                return True
            torch.save(self._model(), line)
            self.answer(0)
        return False

    def answer(self, num_steps: int) -> None:
        """Report the end of a round."""
        self._answers.write(f"{num_steps}\n")


def serve(make_round: Callable[[], int], model: Model) -> None:
    """Make rounds on request, and report their steps."""
    line = Line(model)
    while line.wait():
        line.answer(make_round())


def task_folder(description: str | None) -> Path:
    """Return the folder of the task, an argument of a peer's program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="where the task is")
    folder: Path = parser.parse_args().folder
    return folder
