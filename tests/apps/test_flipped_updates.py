"""Sites of which one turns its updates round, with the real server and real clients."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from knnper.cli.flower_apps import Order, lead_sites
from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.experiment import Experiment
from knnper.server.observer import Observer
from knnper.simulation.catalogue import over_sites
from knnper.simulation.partition.export import export_shares
from knnper.simulation.workbench import open_workbench
from tests.apps.site_grid import SiteGrid, experiment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inside_a_run")]
NAMES, BAD = ("0000", "0001", "0002", "0003", "0004"), "0001"


def five_sites(folder: Path, settings: Experiment) -> SiteGrid:
    bench = open_workbench(settings)
    export_shares(bench.clients.dataset, bench.partition, folder / "shares")
    files: dict[int, Path] = {}
    for node, name in enumerate(NAMES, start=10):
        files[node] = folder / f"{name}.yaml"
        files[node].write_text(
            f"name: '{name}'\nserver: 127.0.0.1:1\ninsecure: true\n"
            f"state: state-{name}\ndata: {{name: npz, path: shares/{name}.npz}}\n"
        )
    return SiteGrid(files)


def test_exploded_training_of_sites_is_made_again_without_the_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = ClientRuntime.train

    def flipped(self: ClientRuntime, request: TrainingRequest) -> Any:
        update, payload = honest(self, request), request.payload
        if request.client != BAD:
            return update
        weights = payload.weights - 10 * (update.weights - payload.weights)
        return type(update)(weights, update.num_examples, update.train_loss)

    monkeypatch.setattr(ClientRuntime, "train", flipped)
    settings = experiment(
        **{
            "method": "{name: fedavg}",
            "partition.num_clients": 5,
            "partition.alpha": 5.0,
            "partition.unseen_fraction": 0,
            "training.num_rounds": 10,
            "training.learning_rate": 0.2,
            "run.validate_every": 0,
            "run.metrics": [],
            "run.federation.clip_median_ratio": "null",
        }
    )
    grid = five_sites(tmp_path, settings)
    order = Order(over_sites(settings), tmp_path / "run", False, False, None)
    with caplog.at_level(logging.WARNING):
        folder = lead_sites(grid, order, Observer())  # type: ignore[arg-type]
    training = folder.results()["training"]
    (suspect,) = training["left_out"]
    assert suspect["client"] == BAD
    assert suspect["cosine"] < -0.3
    assert f"client {BAD} is left out from there on" in caplog.text
    records = folder.rounds()
    assert [one["server_round"] for one in records] == list(range(1, 11))
    assert {one["num_clients"] for one in records[suspect["after_round"] :]} == {4}
    assert all(
        (one.get("left_out") == [BAD]) == (one["server_round"] > suspect["after_round"])
        for one in records
    )
    # It gets the model all the same, which is far better than chance.
    lines = (folder.path / "personalization.jsonl").read_text().splitlines()
    assert {json.loads(line)["result"]["client"] for line in lines} == set(NAMES)
    assert folder.results()["seen"]["accuracy_weighted"] > 0.25
