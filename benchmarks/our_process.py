"""A contender of `benchmarks.peers` that runs in our environment."""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from flwr.serverapp import Grid
from torch import fx

from benchmarks import stock
from benchmarks.bare_model import bare_images, bare_network
from benchmarks.bare_training import train_share, training_shares
from benchmarks.peer_process import PeerTask, serve
from benchmarks.rounds import rounds_of
from benchmarks.workload import LEARNING_RATE, MOMENTUM, Workload, on_flower
from knnper.process import prepare_process
from knnper.server.federation import Federation
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, runtime_of

WORKLOAD_FILE = "workload.json"


def task_of(workload: Workload) -> PeerTask:
    """Convert a workload to a task in plain torch.

    The network is traced, so that it can be loaded without its class.
    """
    bench = workload.workbench()
    network = bare_network(bench.experiment.model, bench.clients.dataset.spec)
    named = bench.task.model.named(bench.task.initial_weights)
    network.load_state_dict(network.state_dict() | named)
    positions = [torch.from_numpy(part.train) for part in bench.partition.clients]
    if workload.num_train % workload.batch_size:
        raise ValueError(
            f"found {workload.num_train} images a client in batches of "
            f"{workload.batch_size}, expected whole batches: frameworks differ in what "
            "they do with the rest"
        )
    return PeerTask(
        network=fx.symbolic_trace(network),
        images=bare_images(bench.clients.dataset)[0],
        clients=torch.stack(positions),
        cohort_size=round(workload.participation * workload.num_clients),
        batch_size=workload.batch_size,
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
    )


def write_task(workload: Workload, folder: Path) -> PeerTask:
    """Write the task for the contenders to a folder, and return it."""
    (folder / WORKLOAD_FILE).write_text(json.dumps(asdict(workload)), "utf-8")
    task = task_of(workload)
    task.save(folder)
    return task


def _serve_ours(bench: Workbench, federation: Federation) -> None:
    size = len(bench.partition.clients[0].train)  # the same for all clients
    steps_per_client = size // bench.experiment.training.batch_size
    with rounds_of(bench, federation) as rounds:

        def make_round() -> int:
            rounds.make_round()
            return rounds.num_trained * steps_per_client

        serve(make_round, lambda: bench.task.model.named(rounds.weights))


def ours_flower(workload: Workload, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Make rounds like a run on Flower's simulation."""
    on_flower(workload, _serve_ours)


def ours_serial(workload: Workload, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Make rounds like a run in one process."""
    bench = workload.workbench()
    run = replace(bench.experiment.run, engine="serial", threads_per_worker=1)
    prepare_process(run, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as run_folder:
        _serve_ours(bench, SerialFederation(runtime_of(bench, Path(run_folder))))


def flower_fedavg(workload: Workload, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Make rounds with Flower's `FedAvg` and a `ClientApp` with the bare loop."""

    def lead(grid: Grid) -> None:
        rounds = stock.TrainingRounds(grid, folder)
        serve(rounds.make_round, rounds.model)

    run = workload.experiment().run
    stock.on_stock_flower(workload.num_clients, run, lead, stock.training_app)


def bare_torch(workload: Workload, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Make this process's share of the steps of a round, on one model."""
    torch.set_num_threads(1)
    num_clients = round(workload.participation * workload.num_clients)
    same_steps = replace(workload, num_clients=num_clients, participation=1.0)
    share = training_shares(same_steps, keeps_memory=False)[rank]

    def make_pass() -> int:
        train_share(share)
        return len(share.batches)

    serve(make_pass, dict)


CONTENDERS: dict[str, Callable[[Workload, Path, int], None]] = {
    contender.__name__: contender
    for contender in (ours_flower, ours_serial, flower_fedavg, bare_torch)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("folder", type=Path, help="where the task is")
    parser.add_argument("--rank", type=int, default=0, help="of the process")
    options = parser.parse_args(arguments)
    text = (options.folder / WORKLOAD_FILE).read_text("utf-8")
    CONTENDERS[options.name](Workload(**json.loads(text)), options.folder, options.rank)


if __name__ == "__main__":
    main()
