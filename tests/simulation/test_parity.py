"""The same bits on every engine, with any number of workers, killed or not.

Real processes: each run is the command a user types.
"""

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.knnper_process import simulate, start, wait_for_rounds

EXPERIMENT = """
name: parity
data: {name: digits}
partition: {name: dirichlet, num_clients: 14, alpha: 0.3, unseen_fraction: 0.2}
model: {name: tiny_cnn, embedding_dim: 16}
training: {num_rounds: 8, participation: 0.5, batch_size: 8, learning_rate: 0.05}
method: {name: METHOD}
run: {seed: 3, checkpoint_every: 2}
"""
METHODS = ["fedavg", "scaffold", "fedem", "pfedhn", "knn_per"]
FAST = ["knn_per"]


class Outcome(NamedTuple):
    """What must be the same."""

    state_sha256: str
    clients_csv: bytes


def experiment(folder: Path, method: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(EXPERIMENT.replace("METHOD", method))
    return path


def outcome(folder: Path) -> Outcome:
    results = json.loads((folder / "results.json").read_text())
    digest = results["training"]["state_sha256"]
    return Outcome(digest, (folder / "clients.csv").read_bytes())


def kill_half_way(folder: Path, *arguments: str | Path) -> None:
    """Start a run and kill it with SIGKILL in the fifth round or so."""
    process = start(folder, *arguments)
    wait_for_rounds(process, folder, 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "results.json").exists(), "the run ended before it was killed"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("method", "workers", "carrier"),
    [
        pytest.param(
            method,
            workers,
            carrier,
            marks=[] if (method, workers) == ("scaffold", "2") else pytest.mark.slow,
        )
        for method in METHODS
        for workers, carrier in (("1", "message"), ("2", "shared_memory"))
    ],
)
def test_engines_agree(tmp_path: Path, method: str, workers: str, carrier: str) -> None:
    path = experiment(tmp_path, method)
    simulate(path, "--engine", "serial", "--output", tmp_path / "serial")
    expected = outcome(tmp_path / "serial")
    assert expected.clients_csv.count(b"\n") == 15
    engine = ("--workers", workers, "--set", f"run.carrier={carrier}")
    simulate(path, *engine, "--output", tmp_path / "flower")
    assert outcome(tmp_path / "flower") == expected


@pytest.mark.slow
@pytest.mark.ray
def test_more_clients_than_requests_at_once_give_the_same_bits(tmp_path: Path) -> None:
    path = experiment(tmp_path, "knn_per")
    many = (
        *("--set", "partition={name: iid, num_clients: 150}"),
        *("--set", "training.participation=1.0", "--set", "training.num_rounds=3"),
        *("--set", "run.validate_every=1"),
    )
    simulate(path, *many, "--engine", "serial", "--output", tmp_path / "serial")
    simulate(path, *many, "--workers", "2", "--output", tmp_path / "flower")
    assert outcome(tmp_path / "flower") == outcome(tmp_path / "serial")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in FAST else pytest.mark.slow)
        for method in METHODS
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    path = experiment(tmp_path, method)
    longer = ("--set", "training.num_rounds=40", "--engine", "serial")
    simulate(path, *longer, "--output", tmp_path / "whole")
    kill_half_way(tmp_path / "killed", path, *longer)
    simulate("--resume", tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    rounds = (tmp_path / "killed" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in rounds] == [*range(1, 41)]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_flower_run_resumes_the_same(tmp_path: Path, method: str) -> None:
    path = experiment(tmp_path, method)
    longer = ("--set", "training.num_rounds=40")
    simulate(path, *longer, "--engine", "serial", "--output", tmp_path / "whole")
    kill_half_way(tmp_path / "killed", path, *longer, "--workers", "2")
    simulate("--resume", tmp_path / "killed", "--workers", "1")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    path = experiment(tmp_path, "fedavg")
    for seed in ("3", "4"):
        arguments = ("--engine", "serial", "--set", f"run.seed={seed}")
        simulate(path, *arguments, "--output", tmp_path / seed)
    assert outcome(tmp_path / "3") != outcome(tmp_path / "4")
