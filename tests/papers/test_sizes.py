"""Hours, bytes and accuracy of weak and strong clients."""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.label_counts import PARTITION, ClientCounts, LabelCounts
from papers.hours import TimedRun, runs_in
from papers.sizes import halves, names_in, size_table, write_sizes
from tests.papers.test_hours import client
from tests.simulation.batches.small_comparison import plan

pytestmark = pytest.mark.integration


def test_halves_are_by_the_device_whatever_a_round_takes() -> None:
    clients = [client(number, 10.0 - number, 1) for number in range(9)]
    run = TimedRun(
        [], pd.DataFrame([*clients, client(9, None, 0)])
    )  # the last one is unseen
    names = {str(number): f"000{number}" for number in range(9)}
    everyone, weak, strong = halves(run, 3, names)
    speeds = [RandomKey(3).device(names[name])[0] for name in everyone["client"]]
    assert speeds == sorted(speeds)
    assert len(everyone) == 9
    assert [*weak["client"], *strong["client"]] == [*everyone["client"]]
    assert len(weak) == 4


def test_a_row_by_hand() -> None:
    rounds = [
        {"virtual_seconds": 1800.0 * one, "bytes_down": 3e9, "bytes_up": 1e9}
        for one in (1, 2)
    ]
    clients = pd.DataFrame([client(number, 1.0, 1) for number in (3, 8)])
    parts = clients, clients.iloc[1:], clients.iloc[:1]
    table = size_table({"a": [(TimedRun(rounds, clients), parts)]}).as_markdown()
    cells = [one.strip() for one in table.splitlines()[2].split("|")[1:-1]]
    # 0.3 with 4 test examples, and 0.8 with 9.
    assert cells == ["a", "1.00", "6.00", "2.00", "64.6", "80.0", "30.0"]


def test_the_sizes_of_a_comparison(tmp_path: Path) -> None:
    half = {
        "method": {"name": "heterofl", "widths": [1.0, 0.5], "assignment": "speed"},
        "title": "HeteroFL",
    }
    rows = {"mean": {"method": {"name": "fedavg"}}, "half": half}
    timed = (
        "training.devices={speed_spread: 10, bytes_up_per_s: 1000}",
        "training.batch_size=4",
        "training.local_steps=2",
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
    (whole,) = runs_in(comparison, tmp_path / "runs")["FedAvg"]
    everyone, _, _ = halves(whole, 1, names_in(whole))
    seconds = everyone["round_seconds"].to_list()
    assert seconds == sorted(seconds, reverse=True)
    assert len(everyone) > 2


def test_clients_are_found_by_what_results_call_them(tmp_path: Path) -> None:
    none = (0,)
    counted = [
        ClientCounts(title, seen=True, train=none, validation=none, test=none)
        for title in ("zoe", "adam")
    ]
    counts = LabelCounts(("a",), tuple(counted), 0)
    (tmp_path / PARTITION).write_text(json.dumps(asdict(counts)))
    run = TimedRun([], [], tmp_path)
    assert names_in(run) == {"zoe": "0000", "adam": "0001"}
    (tmp_path / PARTITION).unlink()
    with pytest.raises(RunError, match=r"has no partition\.json"):
        names_in(run)
