"""Flower as it comes: its FedAvg on its own grid, with clients that only echo."""

import itertools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from knnper.experiment import RunSettings
from knnper.process import num_workers

T = TypeVar("T")

echo_app = ClientApp()


@echo_app.train()
def _train(message: Message, context: Context) -> Message:  # noqa: ARG001
    content = RecordDict(
        {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 1}),
        }
    )
    return Message(content, reply_to=message)


def round_seconds(
    tensors: dict[str, Tensor], num_clients: int, num_rounds: int, run: RunSettings
) -> list[float]:
    """Return the seconds of each round, once a round with one number made a start."""

    def lead(grid: Grid) -> list[float]:
        warm_up(grid, num_clients)
        return make_rounds(grid, tensors, num_clients, num_rounds)

    return on_stock_flower(num_clients, run, lead)


def on_stock_flower(num_clients: int, run: RunSettings, lead: Callable[[Grid], T]) -> T:
    """Return what ``lead`` returns, with echoing clients behind Flower's simulation."""
    outcome: list[T] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        outcome.append(lead(grid))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    workers = num_workers(run)
    run_simulation(
        server_app=server_app,
        client_app=echo_app,
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
    """Make a round with a model of one number, which starts the workers."""
    make_rounds(grid, {"number": torch.zeros(1)}, num_clients, 1)


def make_rounds(
    grid: Grid, tensors: dict[str, Tensor], num_clients: int, num_rounds: int
) -> list[float]:
    """Return the seconds of each round with all clients."""
    ends: list[float] = []

    def note_end(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
        ends.append(time.perf_counter())
        return MetricRecord()

    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(tensors),
        num_rounds=num_rounds,
        # Called before the first round too.
        evaluate_fn=note_end,
    )
    return [end - start for start, end in itertools.pairwise(ends)]
