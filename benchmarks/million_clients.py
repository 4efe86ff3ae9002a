"""Seconds of a round of 1,000 clients out of a million; the baseline has 10,000.

Each number of clients has its own process: the server and the engine `serial`, a linear
model, four examples per client. Rounds alternate, and write checkpoints like a run.
`start_s` is the time until the first round can begin, with the data in memory, and
`peak_megabytes` the final peak memory. Linux only.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.measurement import (
    Measurement,
    make_parser,
    peak_megabytes,
    rounded,
    say,
)
from benchmarks.rounds import Rounds
from benchmarks.workload import Workload
from knnper.data.examples import Dataset, InputSpec, LabelledArrays
from knnper.seeding import RandomKey
from knnper.simulation.partition.split import make_partition
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, build_workbench, runtime_of

PARTICIPANTS = 1000
NUM_TRAIN, NUM_TEST, NUM_CLASSES = 3, 1, 2


def data_of(num_clients: int) -> Dataset:
    """Return images of 2x2 pixels for all clients."""
    spec = InputSpec((2, 2, 1), NUM_CLASSES, (0.5,), (0.25,))
    generator = np.random.default_rng(0)

    def split(count: int) -> LabelledArrays:
        pixels = generator.integers(0, 256, (count, 2, 2, 1), dtype=np.uint8)
        return LabelledArrays(pixels, generator.integers(0, NUM_CLASSES, count))

    train, test = split(NUM_TRAIN * num_clients), split(NUM_TEST * num_clients)
    return Dataset("random", train, test, spec, ("0", "1"))


def workbench_of(dataset: Dataset, num_clients: int) -> Workbench:
    """Return the workload, with 1,000 clients in each round."""
    experiment = Workload(
        num_clients,
        batch_size=NUM_TRAIN,
        model="softmax_regression",
        participation=min(1.0, PARTICIPANTS / num_clients),
    ).experiment()
    experiment = replace(experiment, run=replace(experiment.run, engine="serial"))
    key = RandomKey(experiment.run.seed)
    partition = make_partition(dataset, experiment.partition, key)
    return build_workbench(experiment, dataset, partition, torch.device("cpu"))


def make_rounds(num_clients: int, pipe: Connection) -> None:
    """Send the seconds of the start, then of each requested round, then the memory."""
    torch.set_num_threads(1)
    dataset = data_of(num_clients)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = workbench_of(dataset, num_clients)
        federation = SerialFederation(runtime_of(bench, Path(folder) / "clients"))
        with Rounds(bench, federation, Path(folder) / "checkpoints") as rounds:
            pipe.send(time.perf_counter() - began)
            while pipe.recv():
                pipe.send(rounds.measure_round())
    pipe.send(peak_megabytes())


@contextlib.contextmanager
def process_of(num_clients: int) -> Iterator[Connection]:
    """Start a process that makes rounds until the end of the ``with`` block."""
    spawning = multiprocessing.get_context("spawn")
    connection, remote = spawning.Pipe()
    process = spawning.Process(target=make_rounds, args=(num_clients, remote))
    process.start()
    remote.close()  # so that the other end is seen to close
    try:
        yield connection
    finally:
        connection.close()
        process.join()


def measure(num_clients: int, num_baseline: int, repetitions: int) -> Measurement:
    """Measure the seconds of rounds, without the first, which warms up."""
    sizes = {"": num_clients, "baseline_": num_baseline}
    seconds: dict[str, list[float]] = {name: [] for name in sizes}
    details: dict[str, object] = {"clients": num_clients}
    with contextlib.ExitStack() as stack:
        pipes = {}
        for name, size in sizes.items():
            say(f"million_clients: {size} clients start")
            pipes[name] = stack.enter_context(process_of(size))
            details[f"{name}start_s"] = rounded(pipes[name].recv())
        for repetition in range(repetitions + 1):
            say(f"million_clients: round {repetition + 1}")
            for name, pipe in pipes.items():
                pipe.send(True)
                seconds[name].append(pipe.recv())
        for name, pipe in pipes.items():
            pipe.send(False)
            details[f"{name}peak_megabytes"] = rounded(pipe.recv())
    million_seconds, baseline = (of_size[1:] for of_size in seconds.values())
    pairs = zip(million_seconds, baseline, strict=True)
    details["ratio"] = rounded(
        statistics.median(value / other for value, other in pairs)
    )
    baseline_is = f"seconds of a round of as many out of {num_baseline} clients"
    return Measurement(
        "million_clients", million_seconds, baseline, baseline_is, details
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=7)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--baseline-clients", type=int, default=10_000)
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    print(
        measure(
            options.clients, options.baseline_clients, options.repetitions
        ).as_json()
    )


if __name__ == "__main__":
    main()
