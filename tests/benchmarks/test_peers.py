"""Contenders do the same work: the same steps, and the model of plain averaging."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from benchmarks import our_process, peers, stock
from benchmarks.measurement import Turns
from benchmarks.our_process import write_task
from benchmarks.peer_process import PeerTask
from benchmarks.peers import (
    CONTENDERS,
    Contender,
    NotInstalledError,
    RunningContender,
    figures,
    installed,
    python_of,
    require_same_work,
    with_descendants,
)
from benchmarks.workload import Workload
from tests.server.fake_grid import FakeGrid

pytestmark = pytest.mark.integration

# One step for each client: nothing depends on the order of its images.
WORKLOAD = Workload(6, 4, batch_size=4, model="softmax_regression")
Model = dict[str, Tensor]
Drive = Callable[[str, Path, int], list[tuple[int, Model]]]
NUM_ROUNDS = 2


@pytest.fixture
def task(tmp_path: Path) -> PeerTask:
    return write_task(WORKLOAD, tmp_path)


class TrainingGrid(FakeGrid):
    """Nodes that run a ClientApp for a partition each."""

    def __init__(self, num_nodes: int, app: ClientApp) -> None:
        super().__init__(self._reply, range(1, num_nodes + 1))
        self._app = app

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [self._reply(message) for message in messages]

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        config: dict[str, bool | float | int | str] = {"partition-id": node - 1}
        return self._app(message, Context(1, node, config, RecordDict(), {}))


@pytest.fixture
def drive(inside_a_run: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """Let a contender of ours make rounds in this process, Flower's without Ray."""
    made: list[tuple[int, Model]] = []

    def serve(make_round: Callable[[], int], model: Callable[[], Model]) -> None:
        for _ in range(NUM_ROUNDS):
            num_steps = make_round()
            made.append((num_steps, copy.deepcopy(model())))

    def on_grid(
        num_clients: int,
        run: object,
        lead: Callable[[TrainingGrid], None],
        app: ClientApp,
    ) -> None:
        lead(TrainingGrid(num_clients, app))

    def rounds(name: str, folder: Path, rank: int) -> list[tuple[int, Model]]:
        made.clear()
        our_process.CONTENDERS[name](WORKLOAD, folder, rank)
        return made

    monkeypatch.setattr(our_process, "serve", serve)
    monkeypatch.setattr(stock, "on_stock_flower", on_grid)
    threads = torch.get_num_threads()
    yield rounds
    torch.set_num_threads(threads)


def plain_averaging(task: PeerTask) -> list[Model]:
    """Return the model after each round, written down without any framework."""
    model, after = copy.deepcopy(task.network.state_dict()), []
    for _ in range(NUM_ROUNDS):
        trained: list[Model] = []
        for client in range(len(task.clients)):
            task.network.load_state_dict(model)
            task.train(client)
            trained.append(copy.deepcopy(task.network.state_dict()))
        model = {
            name: torch.stack([one[name] for one in trained]).mean(0) for name in model
        }
        after.append(model)
    return after


def same(found: list[Model], expected: list[Model]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() >= other.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ours_serial", "flower_fedavg"])
def test_ours_and_flower_end_where_plain_averaging_ends(
    name: str, drive: Drive, task: PeerTask, tmp_path: Path
) -> None:
    made = drive(name, tmp_path, 0)
    expected = plain_averaging(task)
    assert not torch.equal(
        expected[0]["classifier.weight"], expected[1]["classifier.weight"]
    )
    assert [num_steps for num_steps, _ in made] == [6, 6]
    same([model for _, model in made], expected)


@pytest.mark.parametrize("name", ["pfl_one", "pfl_two", "blazefl"])
def test_peers_end_where_plain_averaging_ends(
    name: str, task: PeerTask, tmp_path: Path
) -> None:
    kept = peers.parser().parse_args([]).environments
    name_of_package, _, version = CONTENDERS[name].requirement.partition("==")
    found = (
        f"{name_of_package}/lib/*/site-packages/{name_of_package}-{version}.dist-info"
    )
    if not any(kept.glob(found)):
        pytest.skip(f"{CONTENDERS[name].requirement} is not installed in {kept.name}")
    python, models = python_of(CONTENDERS[name], kept), []
    with RunningContender(name, python, tmp_path, num_steps=6) as running:
        for _ in range(NUM_ROUNDS):
            running.make_round()  # refuses another number of steps
            models.append(running.model())
    same(models, plain_averaging(task))


def test_the_bare_processes_share_the_steps_and_have_no_model(
    drive: Drive, task: PeerTask, tmp_path: Path
) -> None:
    first = list(drive("bare_torch", tmp_path, 0))
    second = drive("bare_torch", tmp_path, 1)
    assert [one[0] + two[0] for one, two in zip(first, second, strict=True)] == [6, 6]
    assert all(model == {} for _, model in [*first, *second])


@pytest.mark.parametrize("model", ["leaf_cnn", "mobilenet_v2", "softmax_regression"])
def test_the_task_has_our_initial_weights(model: str, tmp_path: Path) -> None:
    workload = replace(WORKLOAD, model=model, num_clients=20, participation=0.15)
    write_task(workload, tmp_path)
    task, bench = PeerTask.load(tmp_path), workload.workbench()
    assert (task.cohort_size, task.steps_per_client) == (3, 1)
    named = bench.task.model.named(bench.task.initial_weights)
    for name, parameter in task.network.named_parameters():
        assert torch.equal(parameter, named[name])
    images = task.images.batch(task.clients[7])
    ours = bench.clients.data("0007").train.images
    torch.testing.assert_close(images, bench.task.normalize(ours))


def test_incomplete_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found 5 images a client in batches of 4"):
        write_task(replace(WORKLOAD, num_train=5), tmp_path)


@pytest.mark.parametrize("name", peers.WORKLOADS)
def test_workload_has_whole_batches_and_whole_cohorts(name: str) -> None:
    workload = peers.WORKLOADS[name]
    assert workload.num_train % workload.batch_size == 0
    cohort = workload.participation * workload.num_clients
    assert cohort == pytest.approx(round(cohort))


# The processes of a contender.

ANSWERS = """
import torch
from benchmarks.peer_process import serve
def make_round():
    print("not an answer")
    return 3
serve(make_round, lambda: {"weight": torch.ones(2)})
"""


def be(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(peers, "_command", lambda *_: command)


def test_all_processes_make_a_round_and_say_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be(monkeypatch, ANSWERS)
    with RunningContender("pfl_two", "", tmp_path, num_steps=6) as running:
        assert running.make_round() > 0
        assert torch.equal(running.model()["weight"], torch.ones(2))
        assert running.peak_megabytes() > 20
        processes = running._processes
    assert [process.returncode for process in processes] == [0, 0]
    assert "not an answer" in (tmp_path / "pfl_two.log").read_text("utf-8")


def test_other_steps_and_processes_that_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be(monkeypatch, "input(); print(3); input(); raise SystemExit('no memory')")
    with RunningContender("blazefl", "", tmp_path, num_steps=4) as running:
        with pytest.raises(RuntimeError, match="blazefl made 3 steps of SGD"):
            running.make_round()
        with pytest.raises(
            RuntimeError, match="blazefl ended, having said:\nno memory"
        ):
            running.make_round()


def test_processes_are_found_with_what_they_started() -> None:
    program = "import subprocess; print(subprocess.Popen(['cat']).pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    found = with_descendants([parent.pid])
    parent.communicate("\n")
    assert found == {parent.pid, child}


def test_another_first_round_is_refused() -> None:
    network = nn.Linear(2, 1)
    start = copy.deepcopy(network.state_dict())

    def moved(by: float) -> Model:
        return {name: tensor + by for name, tensor in start.items()}

    def check(by: float, is_fixed: bool) -> None:
        require_same_work("pfl_one", moved(by), moved(1.0), network, is_fixed)

    check(1.0001, is_fixed=True)
    check(-1.1, is_fixed=False)
    with pytest.raises(RuntimeError, match="pfl_one differs from ours by 1"):
        check(1.01, is_fixed=True)
    with pytest.raises(RuntimeError, match="expected at most 20"):
        check(0.7, is_fixed=False)
    require_same_work("bare_torch", {}, moved(1.0), network, is_fixed=True)


# Peers that cannot be installed, and what is printed.


def test_a_peer_for_another_python_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "ERROR: Ignored the following versions that require a different python "
        "version: 1.1.0 Requires-Python >=3.12; 2.0.3 Requires-Python >=3.12; 3.0.0 "
        "Requires-Python >=3.14\nERROR: No matching distribution found for blazefl"
    )
    fake = SimpleNamespace(
        run=lambda *_, **__: SimpleNamespace(returncode=1, stderr=said),
        check_output=lambda *_, **__: "Python 3.11.7\n",
    )
    monkeypatch.setattr(peers, "subprocess", fake)
    pythons = installed(["ours_flower", "blazefl"], tmp_path)
    assert pythons == {"ours_flower": sys.executable}
    reason = "blazefl 2.0.3 takes Python >=3.12; found Python 3.11.7"
    assert f"blazefl is left out: {reason}" in capsys.readouterr().err


def test_else_the_reason_is_the_last_word_of_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = SimpleNamespace(
        run=lambda *_, **__: SimpleNamespace(returncode=1, stderr="no\nno network\n"),
        check_output=lambda *_, **__: "Python 3.11.7\n",
    )
    monkeypatch.setattr(peers, "subprocess", fake)
    with pytest.raises(NotInstalledError, match="no network; found Py"):
        python_of(Contender("peer_pfl", [], 1, "pfl==0.6.0"), tmp_path)


def test_what_is_installed_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "subprocess", None)
    (tmp_path / "pfl/lib/python3.12/site-packages/pfl-0.6.0.dist-info").mkdir(
        parents=True
    )
    python = python_of(CONTENDERS["pfl_two"], tmp_path)
    assert python == tmp_path / "pfl/bin/python"


def test_a_line_compares_neighbouring_rounds_and_has_its_command() -> None:
    turns = Turns(values=[1.0, 2.0, 3.0], baselines=[2.0, 5.0, 4.0])
    line = figures("linear", "pfl_two", turns, 512.4)
    found = json.loads(line.as_json())
    assert (found["value"], found["baseline"], found["rounds_per_s"]) == (4, 2, 0.25)
    assert (found["ours_over_this"], found["spread_of_ratio"]) == (0.5, [0.4, 0.75])
    command = "make bench-peers ARGS='--workload linear --only pfl_two'"
    assert found["command"] == command
