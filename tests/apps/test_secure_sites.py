"""Secure aggregation over sites in one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from knnper.cli.flower_apps import Order, lead_sites
from knnper.data.site import open_site
from knnper.errors import RunError
from knnper.server.observer import Observer
from knnper.simulation.catalogue import over_sites
from knnper.transport.messages import Purpose
from tests.apps.site_grid import SiteGrid, experiment, make_sites, simulated

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]

SEEN = ("0000", "0001", "0003")
SECURE: Mapping[str, object] = {
    "training.secure_aggregation": "{name: secagg_plus}",
    # As in the simulation, where no client could claim too much.
    "run.federation.max_share": 1.0,
    "run.federation.max_weight_ratio": "null",
}


def _order(tmp_path: Path) -> Order:
    return Order(over_sites(experiment(**SECURE)), tmp_path / "run", False, False, None)


def test_sites_end_with_the_bits_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = experiment(**SECURE)
    files = make_sites(tmp_path, settings)
    grid = SiteGrid({10 + place: files[name] for place, name in enumerate(SEEN)})
    readings: list[str] = []

    def counted(*given: Any) -> Any:
        readings.append("read")
        return open_site(*given)

    monkeypatch.setattr("knnper.client.site.open_site", counted)
    run = lead_sites(grid, _order(tmp_path), Observer())  # type: ignore[arg-type]
    reference = simulated(tmp_path / "reference", settings)
    for name in ("state_sha256", "train_loss"):
        of_sites, of_simulation = (
            folder.results()["training"][name] for folder in (run, reference)
        )
        assert of_sites == of_simulation
    secure = [node for node, kind in grid.answered if kind == Purpose.SECURE.value]
    assert len(secure) == 2 * 3 * len(SEEN)  # rounds, stages, sites
    # A stage without the model does not read the data.
    assert len(readings) == len(grid.answered) - len(secure)


def test_sites_refuse_a_server_that_asks_for_plain_updates(tmp_path: Path) -> None:
    class Curious(SiteGrid):
        def answer(self, message: Message) -> Message:
            for part in ("masking.array", "masking.entry"):
                message.content.pop(part, None)
            return super().answer(message)

    files = make_sites(tmp_path, experiment(**SECURE))
    grid = Curious({10 + place: files[name] for place, name in enumerate(SEEN)})
    with pytest.raises(RunError, match=r"asks for more than the sum .*\(secure_aggr"):
        lead_sites(grid, _order(tmp_path), Observer())  # type: ignore[arg-type]
