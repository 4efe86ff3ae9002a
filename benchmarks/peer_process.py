"""What a contender of `benchmarks.peers` is made of that needs torch alone.

A contender is one process or several. Whenever one reads a line from its standard
input, it takes part in a round of federated averaging, or writes the global model down,
and answers with the steps of SGD that it made.
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


@dataclass(frozen=True)
class PeerTask:
    """What all contenders train, one epoch a round."""

    network: nn.Module  # before the first round; from normalised images to logits
    images: BareImages  # of all clients
    clients: Tensor  # positions of each one's images, int64 (clients, images)
    cohort_size: int  # clients that train in a round
    batch_size: int  # divides the number of a client's images
    learning_rate: float
    momentum: float

    @property
    def steps_per_client(self) -> int:
        """Steps of SGD of a client in a round."""
        return self.clients.shape[1] // self.batch_size

    def save(self, folder: Path) -> None:
        """Write the task down for the contenders."""
        torch.save({**vars(self), "images": vars(self.images)}, folder / TASK_FILE)

    @classmethod
    def load(cls, folder: Path) -> "PeerTask":
        """Read what `save` wrote: the whole network, which a state would not be."""
        held = torch.load(folder / TASK_FILE, mmap=True, weights_only=False)
        return cls(**{**held, "images": BareImages(**held["images"])})

    def optimizer(self, parameters: Iterable[Tensor], lr: float) -> SGD:
        """Return the optimizer of local training."""
        return SGD(parameters, lr=lr, momentum=self.momentum)

    def train(self, client: int) -> int:
        """Train `network` as it is on a client's images; return the steps."""
        batches = torch.split(self.clients[client], self.batch_size)
        optimizer = self.optimizer(self.network.parameters(), self.learning_rate)
        train(self.network, optimizer, self.images, batches)
        return len(batches)


ROUND = "round"
"""Asks for a round; any other line is the file where the global model is to be."""

Model = Callable[[], dict[str, Tensor]]
"""Returns the global model by the names of the task's network; nothing without one."""


class Line:
    """The pipes to `benchmarks.peers`; whatever else is printed goes to stderr."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Wait until a round is to be made; False is that no more are."""
        while line := sys.stdin.readline().rstrip("\n"):
            if line == ROUND:
                return True
            torch.save(self._model(), line)
            self.answer(0)
        return False

    def answer(self, num_steps: int) -> None:
        """Say that it is done."""
        self._answers.write(f"{num_steps}\n")


def serve(make_round: Callable[[], int], model: Model) -> None:
    """Make rounds, which return their steps, whenever one is asked for."""
    line = Line(model)
    while line.wait():
        line.answer(make_round())


def task_folder(description: str | None) -> Path:
    """Return where the task is, as a peer's program is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="where the task is")
    folder: Path = parser.parse_args().folder
    return folder
