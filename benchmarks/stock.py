"""Stock Flower: FedAvg on its own grid, with clients that echo or train."""

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peer_process import PeerTask
from benchmarks.real_apps_stock import client_app as echo_app
from benchmarks.real_apps_stock import make_rounds
from knnper.experiment import RunSettings
from knnper.process import num_workers

T = TypeVar("T")

training_app = ClientApp()


@functools.lru_cache(maxsize=1)
def _resident(folder: str) -> PeerTask:
    """Build the state of a worker between messages."""
    return PeerTask.load(Path(folder))


@training_app.train()
def _train_own(message: Message, context: Context) -> Message:
    task = _resident(str(message.content.config_records["config"]["folder"]))
    arrays = message.content.array_records["arrays"]
    task.network.load_state_dict(arrays.to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    num_steps = task.train(client)
    num_examples = task.clients.shape[1]
    content = RecordDict(
        {
            "arrays": ArrayRecord(task.network.state_dict()),
            "metrics": MetricRecord({"num-examples": num_examples, "steps": num_steps}),
        }
    )
    return Message(content, reply_to=message)


class TrainingRounds(FedAvg):
    """Rounds in which clients train, one at a time.

    The grid has a node for each client of the folder's task; nodes run `training_app`.
    """

    def __init__(self, grid: Grid, folder: Path) -> None:
        self._folder = folder
        self.task = PeerTask.load(folder)
        self.num_steps = 0
        num_clients = len(self.task.clients)
        num_chosen = self.task.cohort_size
        super().__init__(
            fraction_train=num_chosen / num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=num_chosen,
            min_available_nodes=num_clients,
        )
        self._grid = grid
        self._arrays = ArrayRecord(self.task.network.state_dict())

    def make_round(self) -> int:
        """Make the next round; return the SGD steps of its clients."""
        config = ConfigRecord({"folder": str(self._folder)})
        result = self.start(self._grid, self._arrays, num_rounds=1, train_config=config)
        self._arrays = result.arrays
        return self.num_steps

    def model(self) -> dict[str, Tensor]:
        """Return the global model."""
        return self._arrays.to_torch_state_dict()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Count the steps, and aggregate like `FedAvg`."""
        arrived = list(replies)
        of_each = [
            reply.content.metric_records["metrics"]["steps"] for reply in arrived
        ]
        self.num_steps = sum(map(int, of_each))  # type: ignore[arg-type]
        return super().aggregate_train(server_round, arrived)


def round_seconds(
    tensors: dict[str, Tensor], num_clients: int, num_rounds: int, run: RunSettings
) -> list[float]:
    """Measure the seconds of each round, after a small round for the start."""

    def lead(grid: Grid) -> list[float]:
        warm_up(grid, num_clients)
        return make_rounds(grid, tensors, num_clients, num_rounds)

    return on_stock_flower(num_clients, run, lead)


def on_stock_flower(
    num_clients: int,
    run: RunSettings,
    lead: Callable[[Grid], T],
    client_app: ClientApp = echo_app,
) -> T:
    """Call ``lead`` with clients on Flower's simulation, and return its result."""
    outcome: list[T] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        outcome.append(lead(grid))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    workers = num_workers(run)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {
                "num_cpus": workers,
                "logging_level": logging.ERROR,
                "log_to_driver": False,
            },
        },
    )
    return outcome[0]


def warm_up(grid: Grid, num_clients: int) -> None:
    """Start the workers by a round with a model of one number."""
    make_rounds(grid, {"number": torch.zeros(1)}, num_clients, 1)
