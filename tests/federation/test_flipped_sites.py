"""Five real clients of which one turns its updates round, or two boast together."""

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.federation import site_tricks as trick
from tests.federation.small_federation import (
    EXPERIMENT,
    Example,
    Federation,
    Run,
    found_federation,
)
from tests.federation.test_bad_clients import mean_of_round_1
from tests.processes import Commands

pytestmark = pytest.mark.slow

CLIENTS = ("0000", "0001", "0002", "0003", "0004")
BAD, NUM_ROUNDS = "0001", 15
DOCUMENT: Mapping[str, Any] = {
    **EXPERIMENT,
    "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 5.0},
    "training": {"num_rounds": NUM_ROUNDS, "batch_size": 16, "learning_rate": 0.1},
}


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Example:
    made = Example(tmp_path_factory.mktemp("five"), DOCUMENT)
    made.make()
    return made


@pytest.fixture
def federation(tmp_path: Path, five: Example, commands: Commands) -> Federation:
    return found_federation(tmp_path / "fed", five, commands, clients=CLIENTS)


def accuracy_of_global_model(run: Run) -> float:
    accuracy: float = run.results["seen"]["global"]["accuracy_weighted"]
    return accuracy


def test_a_client_that_flips_its_updates_does_not_spoil_the_model(
    federation: Federation,
) -> None:
    federation.server()
    federation.clients(*CLIENTS)
    for deed in trick.FLIPPED:
        rounds = range(1, NUM_ROUNDS + 1)
        federation.tricks(BAD).plan({trick.training(one): deed for one in rounds})
        submitted, run = federation.submit()
        assert submitted.wait() == 0, deed
        assert [one["server_round"] for one in run.rounds] == list(rounds)
        assert accuracy_of_global_model(run) > 0.7, deed
        clipped = [one for one in run.rounds if BAD in one.get("clipped", {})]
        failed = [one for one in run.rounds if BAD in one.get("failures", {})]
        assert (len(clipped) > 5) == (deed == "flipped x10")
        assert (len(failed) > 5) == (deed == "flipped x100")
        shutil.rmtree(run.folder)
    # What is not clipped explodes, and is made again without the one to blame.
    deeds = {trick.training(one): "flipped x10" for one in rounds}
    federation.tricks(BAD).plan(deeds)
    submitted, run = federation.submit("run.federation.clip_median_ratio=null")
    assert submitted.wait() == 0
    assert accuracy_of_global_model(run) > 0.7
    (left_out,) = run.results["training"]["left_out"]
    assert left_out["client"] == BAD
    assert run.rounds[-1]["left_out"] == [BAD]
    assert [one["server_round"] for one in run.rounds] == list(rounds)
    words = f"client {BAD} is left out from there on"
    assert words in federation.run_log


def test_two_clients_do_not_take_the_mean_by_what_they_claim(
    federation: Federation,
) -> None:
    boasting = ("0002", "0003")
    deeds = ("introduction", trick.training(1), trick.training(2))
    for name in CLIENTS:
        planned = dict.fromkeys(deeds, trick.BOAST) if name in boasting else {}
        federation.tricks(name).plan({"models": trick.KEEP_MODELS, **planned})
    server = federation.server()
    federation.clients(*CLIENTS)
    sizes = {name: federation.num_train(name) for name in CLIENTS}
    known = [sizes[name] for name in CLIENTS if name not in boasting]
    median = statistics.median_low([*known, *2 * [trick.BOASTED]])
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    most = dict.fromkeys(boasting, 2 * median)
    assert mean_of_round_1(federation, {**sizes, **most})
    for name in boasting:
        words = f"client {name} reports {trick.BOASTED} training examples"
        assert words in server.written
