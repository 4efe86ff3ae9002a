"""Hours, bytes and accuracy of weak and strong clients."""

from pathlib import Path

import pytest

from knnper.seeding import RandomKey
from papers.hours import Run
from papers.sizes import halves, size_table, write_sizes
from tests.papers.test_hours import client
from tests.simulation.batches.small_comparison import plan


def test_halves_are_by_the_device_whatever_a_round_takes() -> None:
    clients = [client(number, 10.0 - number, 1) for number in range(9)]
    run = Run([], [*clients, client(9, None, 0)])  # the last one is unseen
    everyone, weak, strong = halves(run, seed=3)
    speeds = [RandomKey(3).device(one.client)[0] for one in everyone]
    assert speeds == sorted(speeds)
    assert len(everyone) == 9
    assert [*weak, *strong] == everyone
    assert len(weak) == 4


def test_a_row_by_hand() -> None:
    rounds = [
        {"virtual_seconds": 1800.0 * one, "bytes_down": 3e9, "bytes_up": 1e9}
        for one in (1, 2)
    ]
    clients = [client(number, 1.0, 1) for number in range(2)]
    weak, strong = sorted(clients, key=lambda one: RandomKey(0).device(one.client))
    table = size_table({"a": [Run(rounds, clients)]}, [0]).as_markdown()
    cells = [one.strip() for one in table.splitlines()[2].split("|")[1:-1]]
    mean = 100 * 0.1 * 2 / 3  # of 0 with one test example, and of 0.1 with two
    assert cells[:4] == ["a", "1.00", "6.00", "2.00"]
    assert [float(one) for one in cells[4:]] == pytest.approx(
        [mean, 100 * weak.accuracy, 100 * strong.accuracy], abs=0.051
    )


def test_the_sizes_of_a_comparison(tmp_path: Path) -> None:
    half = {
        "method": {"name": "heterofl", "widths": [1.0, 0.5], "assignment": "speed"},
        "title": "HeteroFL",
    }
    rows = {"mean": {"method": {"name": "fedavg"}}, "half": half}
    timed = (
        "training.devices={speed_spread: 10, bytes_up_per_s: 1000}",
        "training.learning_rate=0.1",
    )
    comparison = plan(tmp_path, *timed, grid={}, rows=rows, seeds=[1])
    table = write_sizes(comparison, tmp_path / "runs", tmp_path / "out")
    lines = table.as_markdown().splitlines()[2:]
    cells = [[one.strip() for one in line.split("|")[1:-1]] for line in lines]
    assert [one[0] for one in cells] == ["FedAvg", "HeteroFL"]
    hours = [float(one[1]) for one in cells]
    assert hours[0] >= hours[1]
    assert (tmp_path / "out" / "sizes.md").is_file()
