"""The same bits on a Ray cluster; here two nodes of it on this machine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.knnper_process import descendants, simulate, start

EXPERIMENT = """
name: cluster
data: {name: digits}
partition: {name: dirichlet, num_clients: 12, alpha: 0.3, unseen_fraction: 0.2}
model: {name: tiny_cnn, embedding_dim: 16}
training: {num_rounds: 4, batch_size: 8, learning_rate: 0.05}
method: {name: scaffold}
run: {seed: 3}
"""

# In a process of its own: Ray leaves files open and threads running in it.
CLUSTER = """
import json, sys
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
sys.stdin.read()
cluster.shutdown()
"""

pytestmark = [pytest.mark.slow, pytest.mark.ray]


class RunningCluster(NamedTuple):
    """Two nodes with room for one worker each."""

    address: str
    raylets: list[int]


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield RunningCluster(*json.loads(process.stdout.readline()))
        process.communicate("")


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT)
    return path


def wait_for_a_worker_on_each_node(
    process: subprocess.Popen[str], cluster: RunningCluster
) -> None:
    assert len(cluster.raylets) == 2
    while not all(
        any("ClientAppActor" in name for _, name in descendants(raylet))
        for raylet in cluster.raylets
    ):
        assert process.poll() is None, "the run ended without a worker on each node"
        time.sleep(0.01)


def outcome(folder: Path) -> tuple[str, bytes]:
    results = json.loads((folder / "results.json").read_text())
    digest: str = results["training"]["state_sha256"]
    return digest, (folder / "clients.csv").read_bytes()


def test_two_nodes(cluster: RunningCluster, experiment: Path, tmp_path: Path) -> None:
    simulate(experiment, "--engine", "serial", "--output", tmp_path / "serial")
    folder = tmp_path / "cluster"
    process = start(folder, experiment, "--ray-address", cluster.address)
    wait_for_a_worker_on_each_node(process, cluster)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert outcome(folder) == outcome(tmp_path / "serial")
