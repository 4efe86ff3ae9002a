"""Secure aggregation over five real sites; one is killed at each stage."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from knnper.client.secure_sums import SECURE
from knnper.experiment_file import load_experiment
from knnper.records import fingerprint
from knnper.secure.messages import KeysRequest, RoundPlan, UnmaskRequest
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.workbench import open_workbench
from tests.federation import site_tricks as trick
from tests.federation.small_federation import (
    EXPERIMENT,
    Example,
    Federation,
    found_federation,
)
from tests.processes import Commands, wait_until
from tests.secure.lost_replies import Stage, trained

pytestmark = pytest.mark.slow

NAMES = ("0000", "0001", "0002", "0003", "0004")
# By round, the stage at which a site is killed, and the site.
KILLED: Mapping[int, tuple[Stage, str]] = {
    1: (KeysRequest, "0001"),
    2: (RoundPlan, "0002"),
    3: (None, "0003"),
    4: (UnmaskRequest, "0004"),
}


def _document(protocol: str, num_rounds: int) -> dict[str, Any]:
    return {
        **EXPERIMENT,
        "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 1.0},
        "training": {
            **EXPERIMENT["training"],
            "num_rounds": num_rounds,
            "secure_aggregation": {"name": protocol},
        },
        "run": {
            "seed": 0,
            "engine": "serial",
            # As in the simulation, where no client could claim too much.
            "federation": {"max_share": 1.0, "max_weight_ratio": None},
        },
    }


def _federation(
    folder: Path, commands: Commands, document: Mapping[str, Any]
) -> Federation:
    example = Example(folder, document)
    example.make()
    return found_federation(folder / "fed", example, commands, clients=NAMES)


def test_round_goes_on_without_a_site_that_is_killed_at_any_stage(
    tmp_path: Path, commands: Commands
) -> None:
    document = _document("secagg_plus", len(KILLED))
    federation = _federation(tmp_path, commands, document)
    moments = {}
    for server_round, (stage, name) in KILLED.items():
        moment = (
            trick.training(server_round)
            if stage is None
            else f"{stage.__name__} {server_round}"
        )
        federation.tricks(name).plan({moment: trick.HOLD})
        moments[name] = moment
    federation.server()
    nodes = federation.clients(*NAMES)
    submitted, run = federation.submit()
    for name, moment in moments.items():
        tricks = federation.tricks(name)
        wait_until(lambda: tricks.is_at(moment), f"{name} is at {moment}")  # noqa: B023
        nodes[name].kill()
        tricks.plan({})
        federation.clients(name)
    assert submitted.wait() == 0, submitted.written
    # An update that was sent before its site was killed is in the sum.
    assert [record["num_clients"] for record in run.rounds] == [4, 4, 4, 5]
    assert [record["num_failed"] for record in run.rounds] == [1, 1, 1, 0]
    bench = open_workbench(load_experiment(document, experiment_catalogue()))
    lost = {
        server_round: {name: stage} for server_round, (stage, name) in KILLED.items()
    }
    assert run.weights == fingerprint(trained(bench, tmp_path / "serial", lost).state)
    for name in NAMES:
        (file,) = federation.client_folder(name).glob(f"state/runs/*/{SECURE}/*")
        state = json.loads(file.read_text())
        assert not state["masking"]
        assert "1" in state["sums"] or name == "0001"


def test_pairwise_round_is_repeated_without_a_killed_site(
    tmp_path: Path, commands: Commands
) -> None:
    document = _document("pairwise", 2)
    federation = _federation(tmp_path, commands, document)
    federation.tricks("0001").plan({trick.training(1): trick.KILL})
    federation.server()
    federation.clients(*NAMES)
    submitted, run = federation.submit()
    assert submitted.wait() == 0, submitted.written
    assert [record["num_clients"] for record in run.rounds] == [4, 5]
    assert "it is repeated without 0001" in federation.run_log
    bench = open_workbench(load_experiment(document, experiment_catalogue()))
    lost: Mapping[int, Mapping[str, Stage]] = {1: {"0001": None}}
    assert run.weights == fingerprint(trained(bench, tmp_path / "serial", lost).state)
