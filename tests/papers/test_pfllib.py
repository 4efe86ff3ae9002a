"""What PFLlib is given, and what is made of what it leaves: with one of two lines."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from knnper.errors import ConfigError, RunError
from knnper.simulation.batches.comparison import read_comparison
from knnper.simulation.workbench import Workbench, open_workbench
from papers.__main__ import app
from papers.pfllib import arguments_of, report_in, run_pfllib, write_federation
from tests.papers.small_files import COMPARISON, write

pytestmark = pytest.mark.integration

ROWS = {
    "fedavg": {"method": {"name": "fedavg"}},
    "ditto": {"method": {"name": "ditto", "prox_weights": [0.5]}},
    "fedala": {"method": {"name": "fedala"}},
    "local": {"method": {"name": "local"}},
    "momentum": {
        "method": {"name": "fedavg"},
        "training": {"momentum": 0.9},
        "title": "M",
    },
}
SERVER = """
class Server:
    eval_gap, rs_test_acc, Budget = 1, [], []
    def select_clients(self): return []
    def save_results(self): print("saved")
"""
MODELS = """
import torch
class FedAvgCNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
"""
# Its accuracies are the part of client 0's tests that are of class 0, and 0.25; its
# seconds are the sum of all weights.
MAIN = """
import sys, numpy as np
from flcore.servers.serverbase import Server
from flcore.trainmodel.models import FedAvgCNN
name = sys.argv[sys.argv.index("-data") + 1]
data = np.load(f"../dataset/{name}/test/0.npz", allow_pickle=True)["data"].tolist()
server = Server()
server.select_clients()
server.rs_test_acc = [float(np.mean(data["y"] == 0)), 0.25]
weights = [one.detach().double() for one in FedAvgCNN().layers]
server.Budget = [float(sum(one.sum() for one in weights))] * 2
server.save_results()
"""


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    return write(tmp_path, COMPARISON, rows=ROWS, reference="fedavg")


@pytest.fixture
def bench(comparison: Path) -> Workbench:
    return bench_of(comparison, "fedavg")


def bench_of(comparison: Path, row: str) -> Workbench:
    (experiment,) = read_comparison(comparison).variants[row][0].runs.values()
    return open_workbench(experiment)


def test_the_files_hold_what_our_clients_have(bench: Workbench, tmp_path: Path) -> None:
    place = write_federation(bench, tmp_path)
    assert "Cifar10" in place.name  # by which its network is made for 32x32 images
    for number, part in enumerate(bench.partition.clients):
        ours = bench.clients.data(part.name).train, bench.clients.test(part.name)
        for split, examples in zip(("train", "test"), ours, strict=True):
            with np.load(place / split / f"{number}.npz", allow_pickle=True) as file:
                found = file["data"].tolist()
            inputs = bench.task.normalize(examples.images)
            assert found["x"].dtype == np.float32
            assert torch.equal(torch.from_numpy(found["x"]), inputs)
            assert torch.equal(torch.from_numpy(found["y"]), examples.labels)
    with np.load(place / "initial.npz") as file:
        given = [torch.from_numpy(file[name]) for name in file.files]
    bench.task.model.load(bench.task.initial_weights)
    weights = bench.task.model.module.parameters()
    assert all(torch.equal(*pair) for pair in zip(given, weights, strict=True))
    assert write_federation(bench, tmp_path) == place
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == [place.name]


def told(comparison: Path, row: str) -> list[str]:
    return arguments_of(bench_of(comparison, row), 4)


def test_settings_are_told(comparison: Path) -> None:
    found = " ".join(told(comparison, "ditto"))
    assert "-ncl 10 -m CNN -nc 6 -dev cpu -eg 4 -gr 1 -ls 1 -lbs 64" in found
    assert found.endswith("-algo Ditto -mu 0.5")
    assert told(comparison, "fedala")[-6:] == ["-et", "1.0", "-s", "80", "-p", "2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [("local", "found local, expected one of"), ("momentum", "plain SGD")],
)
def test_what_pfllib_has_not_is_refused(
    comparison: Path, row: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        told(comparison, row)


@pytest.fixture
def clone(bench: Workbench, tmp_path: Path) -> Path:
    """Return a PFLlib that tests nothing but what it was given."""
    core = tmp_path / "clone/system/flcore"
    shapes = [tuple(one.shape) for one in bench.task.model.module.parameters()]
    for place, text in (
        (core / "servers/serverbase.py", SERVER),
        (core / "trainmodel/models.py", f"SHAPES = {shapes}{MODELS}"),
        (core.parent / "main.py", MAIN),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return tmp_path / "clone"


def test_it_is_run_on_our_data_from_our_weights(
    bench: Workbench, comparison: Path, clone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "all"
    common = [str(comparison), "--output", str(output)]
    runner = CliRunner(env={"COLUMNS": "200"})
    assert not runner.invoke(app, ["rounds", *common, "--only", "fedavg"]).exit_code
    python = os.path.relpath(sys.executable)  # it runs in another folder
    more = ["--clone", str(clone), "--python", python]
    shown = runner.invoke(app, ["pfllib", common[0], "fedavg", *common[1:], *more])
    assert shown.exit_code == 0, shown.output
    own = output / "pfllib/fedavg"
    assert (own / "output.txt").read_text() == "saved\n"
    report = json.loads((own / "report.json").read_text())
    part = bench.partition.clients[0].name
    assert report["test"] == [
        (bench.clients.test(part).labels == 0).double().mean(),
        0.25,
    ]
    total = bench.task.initial_weights.double().sum().item()
    assert report["seconds"] == pytest.approx([total] * 2)
    assert "25.00 (1)" in shown.output


def test_a_failure_is_told(bench: Workbench, clone: Path, tmp_path: Path) -> None:
    (clone / "system/main.py").write_text("raise ValueError('no luck')")
    arguments: Any = bench.experiment, clone, sys.executable, tmp_path / "own", 1
    with pytest.raises(RunError, match=r"output\.txt: ValueError: no luck"):
        run_pfllib(*arguments)
    (clone / "system/main.py").unlink()
    with pytest.raises(RunError, match="expected a clone of PFLlib"):
        run_pfllib(*arguments)


def test_readings_of_a_report(tmp_path: Path) -> None:
    assert report_in(tmp_path, "fedavg") is None
    report = {"every": 2, "test": [0.1, 0.2, 0.3, 0.4], "seconds": [9, 1, 9, 3, 9]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = report_in(tmp_path, "ditto")
    # After 0 and 2 rounds, of the personal models; rounds 1 and 3 begin with no test.
    expected = [{"server_round": 0, "test": 0.2}, {"server_round": 2, "test": 0.4}]
    assert found == (expected, 2.0)
