"""The same bits on every engine, ended in the middle or not.

Each run is the command a user types, in a process of its own where one has others or
is ended; what a serial one leaves is compared with them.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from knnper.cli.app import app
from tests.processes import KNNPER, Commands, Running, wait_until
from tests.simulation.knnper_process import descendants, outcome, validations

EXPERIMENT = """
name: parity
data: {name: digits}
partition: {name: dirichlet, num_clients: 14, alpha: 0.3, unseen_fraction: 0.2}
model: {name: tiny_cnn, embedding_dim: 64}  # large enough to travel as a file
training:
  num_rounds: 4
  participation: 0.5
  batch_size: 8
  learning_rate: 0.05
  compression: {name: top_k, fraction: 0.2}  # so that clients keep what it leaves out
  devices: {speed_spread: 30, available: 0.7, period_s: 2}  # so that they are late
  timing: {name: buffered, buffer_size: 4}
method: {name: scaffold}
personalization: {name: knn}
run:
  seed: 3
  checkpoint_every: 2
  metrics: [balanced_accuracy, macro_f1, auroc, log_loss, ece]
  save_predictions: true
  validate_every: 2
"""
FEDAVG_WITH_KNN = """
name: fedavg
data: {name: digits}
partition: {name: dirichlet, num_clients: 8, alpha: 0.3, unseen_fraction: 0.25}
model: {name: tiny_cnn, embedding_dim: 64}  # large enough to travel as a file
training: {num_rounds: 3, participation: 0.5, batch_size: 8, learning_rate: 0.05}
method: {name: knn_per}
run: {seed: 1, save_predictions: true}
"""
LONGER = ("--set", "training.num_rounds=20")
SLOW_RAY = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "experiment.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def whole(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the longer run leaves in one process, not ended before."""
    folder = tmp_path_factory.mktemp("parity") / "whole"
    in_this_process(experiment, *LONGER, "--engine", "serial", "--output", folder)
    return folder


def in_this_process(*arguments: str | Path) -> None:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert done.exit_code == 0, done.output


def start(
    commands: Commands, folder: Path, *arguments: str | Path, **environment: str
) -> Running:
    command = [KNNPER, "simulate", *arguments, "--output", folder]
    return commands.start("simulate", command, environment)


def simulate(
    commands: Commands, folder: Path, *arguments: str | Path, **environment: str
) -> tuple[str, bytes, bytes | None]:
    process = start(commands, folder, *arguments, **environment)
    assert process.wait() == 0, process.written
    return outcome(folder)


def wait_for_rounds(process: Running, folder: Path) -> None:
    path = folder / "rounds.jsonl"

    def are_made() -> bool:
        assert not process.ended, "the run ended too soon"
        return path.exists() and path.read_text().count("\n") >= 3

    wait_until(are_made, "three rounds")


@pytest.mark.integration
@pytest.mark.ray
def test_engines_agree(
    experiment: Path, whole: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "two"
    left = simulate(commands, folder, experiment, *LONGER, "--workers", "2")
    assert left == outcome(whole)
    assert validations(folder) == validations(whole)
    assert left[1].count(b"\n") == 15
    assert [record is None for record in validations(folder)] == [True, False] * 10


@pytest.mark.ray
def test_engines_agree_on_fedavg_with_knn_per(
    tmp_path: Path, commands: Commands
) -> None:
    """The project's main case, without the processors and schedules of `EXPERIMENT`."""
    path = tmp_path / "experiment.yaml"
    path.write_text(FEDAVG_WITH_KNN)
    in_this_process(path, "--engine", "serial", "--output", tmp_path / "serial")
    over_ray = simulate(commands, tmp_path / "flower", path, "--workers", "2")
    assert over_ray == outcome(tmp_path / "serial")
    assert over_ray[1].count(b"\n") == 9  # a header and a line for each client


PRIVACY = [
    "{clip_norm: 0.5, epsilon: 8, adaptive: true}",
    "{clip_norm: 0.5, noise_multiplier: 0.5, correlated: true}",
    "{clip_norm: 0.5, noise_multiplier: 0.2, noise_shares: 3}",
]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("privacy", PRIVACY)
def test_engines_agree_on_private_rounds(
    tmp_path: Path, commands: Commands, privacy: str
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(f"{FEDAVG_WITH_KNN}privacy: {privacy}\n")
    in_this_process(path, "--engine", "serial", "--output", tmp_path / "serial")
    over_ray = simulate(commands, tmp_path / "flower", path, "--workers", "2")
    assert over_ray == outcome(tmp_path / "serial")


OWN_NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.out = nn.Linear(144, num_classes)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        x = self.norm(self.conv(x - self.mean)).relu()
        return self.out(x.view(-1, 144))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_engines_agree_on_a_network_of_a_user(
    experiment: Path, tmp_path: Path, commands: Commands
) -> None:
    (tmp_path / "model.py").write_text(OWN_NETWORK)
    path, network = tmp_path / "own.yaml", ("--set", "model={name: 'model:Net'}")
    path.write_text(experiment.read_text())
    in_this_process(
        path, *network, "--engine", "serial", "--output", tmp_path / "serial"
    )
    over_ray = simulate(commands, tmp_path / "flower", path, *network, "--workers", "2")
    assert over_ray == outcome(tmp_path / "serial")


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_continued_on_the_other_engine_ends_the_same(
    experiment: Path, whole: Path, tmp_path: Path, commands: Commands
) -> None:
    in_this_process(experiment, "--engine", "serial", "--output", tmp_path / "first")
    folder, more = tmp_path / "more", ("--continue-from", tmp_path / "first")
    continued = simulate(commands, folder, *more, *LONGER, "--engine", "flower")
    assert continued == outcome(whole)
    assert validations(folder) == validations(whole)


@pytest.mark.slow
@pytest.mark.ray
def test_what_flower_keeps_to_itself_changes_no_bit(
    experiment: Path, tmp_path: Path, commands: Commands
) -> None:
    outcomes = []
    for name, engine, plain in (("one", "serial", "0"), ("plain", "flower", "1")):
        way = (experiment, "--engine", engine, "--workers", "1")
        left = simulate(commands, tmp_path / name, *way, KNNPER_PLAIN_FLOWER=plain)
        outcomes.append((left, validations(tmp_path / name)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
@pytest.mark.ray
def test_several_clients_to_a_task_change_no_bit(
    tmp_path: Path, commands: Commands
) -> None:
    # Each worker has four tasks of a round at least, here of up to ten clients.
    small = yaml.safe_load(EXPERIMENT)
    experiment = tmp_path / "small.yaml"
    small["partition"] |= {"num_clients": 50}
    small["training"] |= {"participation": 1.0, "timing": {"name": "synchronous"}}
    small["training"]["devices"] = None
    experiment.write_text(yaml.safe_dump(small))
    expected = simulate(commands, tmp_path / "one", experiment, "--engine", "serial")
    together = simulate(commands, tmp_path / "two", experiment, "--workers", "1")
    assert together == expected


@pytest.mark.slow
@pytest.mark.ray
def test_more_clients_than_requests_at_once_give_the_same_bits(
    experiment: Path, tmp_path: Path, commands: Commands
) -> None:
    many = (
        *(experiment, "--set", "partition={name: iid, num_clients: 150}"),
        *("--set", "training.participation=1.0", "--set", "run.validate_every=1"),
    )
    expected = simulate(commands, tmp_path / "one", *many, "--engine", "serial")
    assert simulate(commands, tmp_path / "two", *many, "--workers", "2") == expected
    stored = ("--workers", "2", "--set", "run.carrier=object_store")
    assert simulate(commands, tmp_path / "three", *many, *stored) == expected


@pytest.mark.parametrize(
    ("engine", "end"),
    [
        pytest.param("serial", signal.SIGKILL, marks=pytest.mark.integration),
        pytest.param("serial", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("flower", signal.SIGKILL, marks=SLOW_RAY),
        pytest.param("flower", signal.SIGINT, marks=SLOW_RAY),
    ],
)
def test_a_run_that_was_ended_resumes_to_the_same_bits(
    experiment: Path,
    whole: Path,
    tmp_path: Path,
    commands: Commands,
    engine: str,
    end: signal.Signals,
) -> None:
    folder = tmp_path / "ended"
    process = start(commands, folder, experiment, *LONGER, "--engine", engine)
    wait_for_rounds(process, folder)
    os.killpg(process.pid, end)
    status = process.wait()
    assert not (folder / "results.json").exists(), "the run ended before"
    if end == signal.SIGINT:
        assert status == 130
        assert f"knnper simulate --resume {folder}" in process.written
        assert "Traceback" not in process.written
    in_this_process("--resume", folder, "--engine", "serial")
    assert outcome(folder) == outcome(whole)
    assert validations(folder) == validations(whole)
    rounds = (folder / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in rounds] == [*range(1, 21)]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("carrier", ["auto", "message", "object_store"])
def test_a_dead_worker_ends_the_run(
    experiment: Path, tmp_path: Path, commands: Commands, carrier: str
) -> None:
    folder, way = tmp_path / "run", ("--set", f"run.carrier={carrier}")
    process = start(commands, folder, experiment, *LONGER, *way, "--workers", "2")
    wait_for_rounds(process, folder)
    workers = [pid for pid, name in descendants(process.pid) if "ClientApp" in name]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait() == 1
    assert "a worker process died" in process.written
    assert f"knnper simulate --resume {folder}" in process.written


# In a process of its own: Ray leaves files open and threads running in it.
CLUSTER = """
import json, signal
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
raylets = [
    info.process.pid
    for node in cluster.list_all_nodes()
    for info in node.all_processes["raylet"]
]
print(json.dumps([cluster.address, raylets]), flush=True)
signal.sigwait([signal.SIGTERM])
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_cluster_of_two_nodes_ends_the_same(
    experiment: Path, tmp_path: Path, commands: Commands
) -> None:
    expected = simulate(commands, tmp_path / "one", experiment, "--engine", "serial")
    cluster = commands.start("cluster", [sys.executable, "-c", CLUSTER])
    address, raylets = json.loads(cluster.wait_for(r'\["\S+:\d+", \[\d+, \d+\]\]'))
    folder = tmp_path / "cluster"
    process = start(commands, folder, experiment, "--ray-address", address)

    def works(raylet: int) -> bool:
        assert not process.ended, "the run ended without a worker on each node"
        return any("ClientAppActor" in name for _, name in descendants(raylet))

    wait_until(lambda: all(map(works, raylets)), "a worker on each node")
    assert process.wait() == 0, process.written
    assert outcome(folder) == expected
    other = ("--ray-address", address, "--set", "run.carrier=message")
    assert simulate(commands, tmp_path / "other", experiment, *other) == expected
    # Who names no cluster joins none, though this one is found on the machine.
    assert simulate(commands, tmp_path / "own", experiment) == expected
    cluster.process.terminate()
    cluster.wait()
