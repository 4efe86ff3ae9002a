"""What results, clients, sweeps, reports and comparisons call degraded is one thing."""

import csv
import json
from pathlib import Path

import pytest

from knnper.server.results import fraction_degraded
from knnper.server.run_folder import RunFolder
from knnper.simulation.batches.runner import Outcome
from knnper.simulation.batches.tables import (
    figures_of,
    rows_of,
)
from knnper.simulation.reports.accuracy_table import (
    VS_FEDAVG,
    as_cells,
    table_of,
)
from knnper.simulation.reports.finished_run import load_run
from knnper.simulation.reports.setups import setups_of
from tests.simulation.batches.small_comparison import ROWS, plan
from tests.simulation.reporting.made_runs import client_result, made_run


def test_equal_is_not_degraded_and_unknown_is_left_out() -> None:
    pairs = [(0.5, 0.5), (0.4, 0.5), (0.6, 0.5), (None, 0.5), (0.1, None), (0.0, 1.0)]
    assert fraction_degraded(pairs) == 0.5
    assert fraction_degraded([(None, None)]) is None


def accuracies(run: Path, column: str) -> dict[str, float]:
    with (run / "clients.csv").open(newline="") as file:
        return {
            row["client"]: float(row[column])
            for row in csv.DictReader(file)
            if row[column] and row["seen"] == "true"
        }


def counted(run: Path, other: Path, column: str) -> float:
    """Count by hand, from the files, the seen clients that do worse."""
    accuracy_of, reference = accuracies(run, "accuracy"), accuracies(other, column)
    worse = [accuracy_of[client] < reference[client] for client in accuracy_of]
    return sum(worse) / len(worse)


@pytest.mark.integration
def test_all_say_the_same_of_the_same_runs(tmp_path: Path) -> None:
    def make(method: str, seed: int) -> Path:
        clients = [client_result(number, seed, num_test=8) for number in range(24)]
        return made_run(tmp_path / method, clients, method=method)

    fedavg = make("fedavg", 0)
    names = ("knn_per", "fedavg_plus", "fedrep")
    runs = {name: make(name, seed) for seed, name in enumerate(names, start=1)}
    rows = {
        row.setup: row
        for row in table_of(setups_of(map(load_run, (fedavg, *runs.values()))))
        if row.group == "seen" and not row.is_reference
    }
    other = {**ROWS["mean"], "title": "Other"}
    comparison = plan(tmp_path, rows={"mean": ROWS["mean"], "other": other}, seeds=[0])
    mean, another = (points[0] for points in comparison.variants.values())
    for name, run in runs.items():
        reported = rows[load_run(run).title].figures
        swept = figures_of(run)["seen.fraction_degraded"]
        # Against the run's own global model: results, report and sweep.
        by_hand = counted(run, run, "accuracy_global")
        assert 0 < by_hand < 1
        assert RunFolder(run).results()["seen"]["fraction_degraded"] == by_hand
        means_something = name != "fedrep"
        expected = by_hand if means_something else None
        assert reported["fraction_degraded"].mean == swept == expected
        # Against FedAvg: report and comparison.
        compared = [Outcome(mean, {0: fedavg}), Outcome(another, {0: run})]
        _, row = rows_of(comparison, compared)
        by_hand = counted(run, fedavg, "accuracy")
        assert 0 < by_hand < 1
        assert (
            reported[VS_FEDAVG].mean
            == row.estimates["seen.fraction_degraded"].mean
            == by_hand
        )


def test_labels_say_against_whom(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / name, method=name) for name in ("knn_per", "fedrep")]
    header, *_ = as_cells(table_of(setups_of(map(load_run, paths))))
    assert {"degraded vs global", "degraded vs FedAvg"} < set(header)
    # Alone, a method whose global model is FedAvg's would have the same figure twice.
    header, *_ = as_cells(table_of(setups_of([load_run(paths[0])])))
    assert "degraded vs FedAvg" not in header


def against_fedavg(*paths: Path) -> set[float | None]:
    rows = table_of(setups_of(map(load_run, paths)))
    return {row.figures[VS_FEDAVG].mean for row in rows if row.label != "FedAvg"}


@pytest.mark.parametrize("name", ["clients.csv", "personalization.jsonl", "split"])
def test_when_nothing_is_said_against_fedavg(tmp_path: Path, name: str) -> None:
    paths = [
        made_run(tmp_path / method, method=method) for method in ("fedavg", "fedrep")
    ]
    assert None not in against_fedavg(*paths)
    results = paths[0] / "results.json"
    if name == "split":
        results.write_text(results.read_text().replace("split of", "another split of"))
    else:
        (paths[0] / name).unlink()
    assert (None in against_fedavg(*paths)) == (name != "personalization.jsonl")
    # Of several models of FedAvg none is the one.
    other = made_run(tmp_path / "other", method="fedavg", learning_rate=0.2)
    assert against_fedavg(*paths, other) == {None}


def test_the_earlier_name_is_still_read(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    before = figures_of(run)
    text = (run / "results.json").read_text()
    assert "fraction_degraded" in text
    (run / "results.json").write_text(text.replace("_degraded", "_hurt"))
    assert figures_of(run) == before
    assert "fraction_hurt" not in json.dumps(load_run(run).results)
