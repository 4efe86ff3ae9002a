"""What a memory gains, client by client."""

import csv
from pathlib import Path

import numpy as np
import pytest

from knnper.simulation.batches.runner import run_batch
from papers.gains import ClientGains, clients_in, groups_of, read_gains, write_gains
from tests.simulation.batches.small_comparison import plan

pytestmark = pytest.mark.integration


def test_groups_by_hand() -> None:
    first = ClientGains(
        size=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        skew=np.array([0.0, 0.0, 0.0, 0.5, 0.5]),
        accuracy=np.full(5, 0.25),
        gain=np.array([0.5, 0.0, 0.25, 0.125, 0.0]),
        weight=np.array([1.0, 1.0, 2.0, 3.0, 1.0]),
    )
    second = ClientGains(
        first.size, first.skew, first.accuracy, first.gain / 2, np.ones(5)
    )
    by_size = [one for one in groups_of("a", [first, second]) if one.axis == "size"]
    assert [one.place for one in by_size] == [1, 2, 3, 4, 5]
    assert [one.gain.mean for one in by_size] == [0.375, 0, 0.1875, 0.09375, 0]
    by_skew = [one for one in groups_of("a", [first]) if one.axis == "skew"]
    assert [one.place for one in by_skew] == [0, 0.5]
    assert by_skew[0].gain.mean == pytest.approx((0.5 + 0 + 2 * 0.25) / 4)
    assert by_skew[1].gain.mean == pytest.approx(3 * 0.125 / 4)
    (everyone,) = [one for one in groups_of("a", [first]) if one.axis == "global"]
    assert everyone.place == 0.25


def test_the_gains_of_a_comparison(tmp_path: Path) -> None:
    comparison = plan(tmp_path, grid={})
    (made,) = [
        one
        for one in run_batch(comparison, tmp_path / "small", 1, lambda _: None)
        if one.point.variant == "memory"
    ]
    clients = clients_in(made.runs[1])
    assert np.all(clients.size > 0)
    assert np.all((clients.skew >= 0) & (clients.skew < 1))
    groups = read_gains([tmp_path / "small.yaml"], tmp_path, "memory")
    write_gains(groups, tmp_path / "out")
    with (tmp_path / "out/gains.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["axis"] for row in rows} == {"size", "skew", "global"}
    assert len(rows) == len(groups)
    assert (tmp_path / "out/gains.svg").is_file()
