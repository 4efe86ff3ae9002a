"""The numbers of the charts, against a plain reading of the files of the runs."""

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.server.run_folder import RunFolder
from knnper.simulation.label_counts import ClientCounts, LabelCounts
from knnper.simulation.reports import (
    client_charts,
    client_table,
    curves,
    partition_chart,
    reliability,
)
from knnper.simulation.reports.accuracy_table import table_of
from knnper.simulation.reports.client_table import clients_of_setup, sample_names
from knnper.simulation.reports.figure import SERIES
from knnper.simulation.reports.finished_run import load_run
from knnper.simulation.reports.picture import DescribedChart, as_svg
from knnper.simulation.reports.sections import draw_sections
from knnper.simulation.reports.setups import Setup, setups_of
from tests.simulation.reporting.made_runs import client_result, made_run


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return two seeds of one setup, with clients that have no test examples."""
    clients = {seed: [client_result(n, seed) for n in range(40)] for seed in (0, 1)}
    assert any(client.personal.num_examples == 0 for client in clients[0])
    return [
        made_run(tmp_path / str(seed), results, seed=seed)
        for seed, results in clients.items()
    ]


@pytest.fixture
def setup(paths: list[Path]) -> Setup:
    (only_setup,) = setups_of(map(load_run, paths))
    return only_setup


@pytest.fixture
def rows(paths: list[Path]) -> list[dict[str, str]]:
    """Return the lines of all clients.csv whose client was tested."""
    return [row for path in paths for row in rows_of(path)]


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with (path / "clients.csv").open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["num_test"] != "0")


def test_scatter(setup: Setup, rows: list[dict[str, str]]) -> None:
    scatter = client_charts.scatters([setup])["kNN-Per"]
    pairs = [(float(row["accuracy_global"]), float(row["accuracy"])) for row in rows]
    seen = [row["seen"] == "true" for row in rows]
    assert scatter.points == Counter(
        (group, *pair) for group, pair in zip(seen, pairs, strict=True)
    )
    assert scatter.num_better == sum(personal > other for other, personal in pairs) > 0
    assert scatter.num_equal == sum(personal == other for other, personal in pairs) > 0
    assert scatter.num_worse == sum(personal < other for other, personal in pairs) > 0


@pytest.mark.integration
def test_of_many_clients_a_sample_is_drawn(
    setup: Setup, rows: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = client_charts.scatters([setup])["kNN-Per"]
    monkeypatch.setattr(client_table, "MOST_CLIENTS", 15)
    # In whatever order they come, and of both runs the same ones.
    by_hash = sorted(rows, key=lambda row: sha256(row["client"].encode()).digest())
    drawn = [row for row in rows if row in by_hash[:15]]
    names = clients_of_setup(setup)["client"]
    assert [names[place] for place in sample_names(names)] == [
        row["client"] for row in drawn
    ]
    cut = client_charts.scatters([setup])["kNN-Per"]
    assert cut.points == Counter(
        (row["seen"] == "true", float(row["accuracy_global"]), float(row["accuracy"]))
        for row in drawn
    )
    assert cut.verdict == whole.verdict, "all are counted"
    (section,) = (
        client
        for client in draw_sections([setup], table_of([setup]))
        if client.name == "clients"
    )
    assert section.text.endswith(
        f"Drawn are 15 of the {len(rows)} clients of kNN-Per: a sample by the SHA-256 "
        "of their names."
    )
    monkeypatch.setattr(client_table, "MOST_CLIENTS", len(rows))
    assert client_charts.scatters([setup])["kNN-Per"] == whole
    picture = client_charts.draw_scatters([setup], {"kNN-Per": SERIES[0]})
    assert picture is not None
    assert picture.note == ""


def test_size_classes(setup: Setup, rows: list[dict[str, str]]) -> None:
    classes = client_charts.size_classes(clients_of_setup(setup))
    assert 2 <= len(classes) <= 6
    assert sum(size_class.num_clients for size_class in classes) == len(rows)
    for before, after in itertools.pairwise(classes):
        assert before.largest < after.smallest
    for size_class in classes:
        inside = [
            row
            for row in rows
            if size_class.smallest <= float(row["num_stored"]) <= size_class.largest
        ]
        assert size_class.num_clients == len(inside)
        num_test = sum(int(row["num_test"]) for row in inside)
        for drawn_values, column in (
            (size_class.accuracy, "accuracy"),
            (size_class.accuracy_global, "accuracy_global"),
        ):
            right = sum(float(row[column]) * int(row["num_test"]) for row in inside)
            assert drawn_values == pytest.approx(right / num_test)


def test_memories_of_one_size_are_not_parted(setup: Setup) -> None:
    clients = clients_of_setup(setup)
    same = clients.iloc[[0] * 40]
    (only,) = client_charts.size_classes(same)
    assert only.smallest == only.largest == same["num_stored"].iloc[0]
    assert only.num_clients == 40
    assert client_charts.size_classes(clients.iloc[:0]) == []


def test_weights(setup: Setup, rows: list[dict[str, str]]) -> None:
    counts = client_charts.count_weights(clients_of_setup(setup))
    assert counts is not None
    for group, of_group in (("true", counts.seen), ("false", counts.unseen)):
        chosen = Counter(
            round(20 * float(row["knn_weight"])) for row in rows if row["seen"] == group
        )
        assert of_group.tolist() == [chosen[place] for place in range(21)]
    weights = [float(row["knn_weight"]) for row in rows]
    assert counts.mean == pytest.approx(sum(weights) / len(weights))


def test_reliability(setup: Setup, paths: list[Path]) -> None:
    lines = [
        json.loads(line)["result"]
        for path in paths
        for line in (path / "personalization.jsonl").read_text().splitlines()
    ]
    panels = reliability.panels_of([setup])
    assert [panel.group for panel in panels] == ["seen", "unseen"]
    for panel in panels:
        group = [line for line in lines if line["seen"] == (panel.group == "seen")]
        for drawn_bins, key in (
            (panel.personal, "personal"),
            (panel.reference, "reference"),
        ):
            assert drawn_bins is not None
            assert sum(drawn_bins.counts) == sum(
                line[key]["num_examples"] for line in group
            )
            assert drawn_bins.counts == plain_bins(group, key, "bin_counts")
            right = plain_bins(group, key, "bin_correct")
            sure = plain_bins(group, key, "bin_confidence")
            assert drawn_bins.accuracy == pytest.approx(
                divided(right, drawn_bins.counts)
            )
            assert drawn_bins.confidence == pytest.approx(
                divided(sure, drawn_bins.counts)
            )
            gaps = sum(abs(a - b) for a, b in zip(right, sure, strict=True))
            assert drawn_bins.calibration_error == pytest.approx(
                gaps / sum(drawn_bins.counts)
            )


def plain_bins(group: list[dict[str, Any]], key: str, name: str) -> tuple[Any, ...]:
    """Return sums over the clients of the bins that hold any example."""
    held = [
        place
        for place in range(15)
        if any(line[key]["bin_counts"][place] for line in group)
    ]
    return tuple(sum(line[key][name][place] for line in group) for place in held)


def divided(sums: tuple[Any, ...], counts: tuple[int, ...]) -> list[float]:
    return [total / count for total, count in zip(sums, counts, strict=True)]


def test_what_the_runs_lack_is_not_drawn(tmp_path: Path) -> None:
    clients = [client_result(number, own=False) for number in range(9)]
    path = made_run(tmp_path / "run", clients, method="fedavg", losses=())
    setups, colors = setups_of([load_run(path)]), {"FedAvg": SERIES[1]}
    assert client_charts.draw_scatters(setups, colors) is None
    assert client_charts.draw_store_sizes(setups, colors) is None
    assert client_charts.draw_weights(setups, colors) is None
    (path / "personalization.jsonl").unlink()
    assert reliability.draw_reliability(setups, colors) is None
    (path / "clients.csv").unlink()
    assert clients_of_setup(setups[0]).empty


def test_nothing_is_drawn_beside_a_model_that_means_nothing(tmp_path: Path) -> None:
    """Local's unpersonalised model is an untrained network."""
    setups = setups_of([load_run(made_run(tmp_path / "run", method="local"))])
    colors = {"Local": SERIES[1]}
    assert client_charts.draw_scatters(setups, colors) is None
    assert [panel.reference for panel in reliability.panels_of(setups)] == [None, None]
    for draw, most in (
        (reliability.draw_reliability, 2),
        (client_charts.draw_store_sizes, 1),
    ):
        picture = draw(setups, colors)
        assert picture is not None
        assert "global" not in picture.alternative
        # The diagonal and the model's own line, or that line alone.
        assert {len(axes.lines) for axes in picture.figure.axes} == {most}


def test_bins_of_another_model_are_not_taken(paths: list[Path]) -> None:
    for path in paths:
        file = path / "personalization.jsonl"
        file.write_text(file.read_text().replace("5" * 64, "6" * 64))
    assert reliability.panels_of(setups_of(map(load_run, paths))) == []


def setups(*paths: Path) -> list[Setup]:
    return setups_of(map(load_run, paths))


def test_seeds_are_averaged_over_the_rounds_that_all_have(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", seed=0, losses=[2.0, 1.0, 0.5])
    second = made_run(tmp_path / "b", seed=1, losses=[3.0, 2.0])
    (curve,) = curves.learning_curves(setups(first, second), "train_loss")
    assert curve.rounds == (1, 2)
    assert curve.by_seed == ((2.0, 1.0), (3.0, 2.0))
    assert curve.mean == [2.5, 1.5]
    # A seed without its file is left out.
    third = made_run(tmp_path / "c", seed=2, losses=())
    (curve,) = curves.learning_curves(setups(second, third), "train_loss")
    assert curve.by_seed == ((3.0, 2.0),)
    # So are rounds without the figure.
    path = made_run(tmp_path / "d", losses=[2.0, float("nan"), 1.0])
    RunFolder(path).append_round({"server_round": 4, "validation_accuracy": 0.5})
    (curve,) = curves.learning_curves(setups(path), "train_loss")
    assert (curve.rounds, curve.mean) == ((1, 3), [2.0, 1.0])
    (curve,) = curves.learning_curves(setups(path), "validation_accuracy")
    assert (curve.rounds, curve.mean) == ((4,), [0.5])
    # No rounds, no curve.
    for figure in ("train_loss", "validation_accuracy"):
        assert curves.learning_curves(setups(third), figure) == []
    assert curves.draw_curves(setups(third), {"kNN-Per": SERIES[0]}) is None


def test_setups_that_train_alike_share_a_curve(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "a", losses=[2.0, 1.0]),
        made_run(tmp_path / "b", method="fedavg", losses=[2.0, 1.0]),
        made_run(tmp_path / "c", method="local", losses=[2.0, 0.0]),
    ]
    drawn_curves = curves.learning_curves(setups(*paths), "train_loss")
    assert [curve.labels for curve in drawn_curves] == [
        ("kNN-Per", "FedAvg"),
        ("Local",),
    ]


def test_own_models_are_drawn_beside_the_global_one(tmp_path: Path) -> None:
    chosen = {"a": "kNN-Per", "b": "FedAvg", "c": "Local"}
    paths = [
        made_run(tmp_path / name, method=method, losses=[])
        for name, method in zip(chosen, ("knn_per", "fedavg", "local"), strict=True)
    ]
    for path, accuracy in zip(paths, (0.75, 0.5, None), strict=True):
        figures: dict[str, Any] = {"server_round": 2, "validation_accuracy": 0.5}
        if accuracy is not None:
            figures["validation_accuracy_personal"] = accuracy
        RunFolder(path).append_round(figures)
    drawn_curves = [
        (curve.labels, curve.mean, curve.setup, curve.is_dashed)
        for curve in curves.validation_curves(setups(*paths))
    ]
    shared = ("kNN-Per, unpersonalised", "Local, unpersonalised")
    assert drawn_curves == [
        (("kNN-Per",), [0.75], "kNN-Per", False),
        (("FedAvg",), [0.5], "FedAvg", False),
        (shared, [0.5], "kNN-Per", True),
    ]
    colors = dict(zip(chosen.values(), SERIES, strict=False))
    picture = curves.draw_curves(setups(*paths), colors)
    assert picture is not None
    (axes,) = picture.figure.axes
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]
    assert "dashed: unpersonalised of kNN-Per, unpersonalised, Local" in (
        picture.alternative
    )


def client(name: str, seen: bool, *train: int) -> ClientCounts:
    return ClientCounts(name, seen, train, validation=(1, 0, 0), test=(9, 9, 9))


COUNTS = LabelCounts(
    ("cat", "dog", "owl"),
    (
        client("0", False, 0, 5, 0),
        client("1", True, 0, 0, 4),
        client("2", True, 2, 0, 0),
        client("3", True, 6, 1, 0),
    ),
)


def test_clients_are_ordered_by_group_and_most_frequent_label() -> None:
    by_class, num_seen, names = partition_chart.ordered_counts(COUNTS)
    # Clients 3, 2, 1 and 0; training and validation together, without the test split.
    expected = [[7, 3, 1, 1], [1, 0, 0, 5], [0, 0, 4, 0]]
    np.testing.assert_array_equal(by_class, expected)
    assert (num_seen, names) == (3, ["3", "2", "1", "0"])


def test_the_first_run_that_kept_its_split_is_drawn(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    setups = setups_of(map(load_run, paths))
    assert partition_chart.first_counts(setups) is None
    assert partition_chart.draw_partition(setups) is None
    (paths[1] / "partition.json").write_text(json.dumps(asdict(COUNTS)))
    assert partition_chart.first_counts(setups) == ("1", COUNTS)
    picture = partition_chart.draw_partition(setups)
    assert picture is not None
    assert picture.alternative == (
        "The split of the run 1: 4 clients, 3 of them seen, with 3 to 8 training and "
        "validation examples, median 5.5; a client has 2 of the 3 labels (median)."
    )
    _, cells, scale = picture.figure.axes
    assert [text.get_text() for text in cells.get_xticklabels()] == ["3", "2", "1", "0"]
    assert scale.get_ylabel() == "examples of a label"
    assert scale.get_ylim() == (1, 7)


def test_of_a_split_over_many_clients_a_sample_is_drawn(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    setups = setups_of([load_run(paths[0])])
    (paths[0] / "partition.json").write_text(json.dumps(asdict(COUNTS)))
    whole = partition_chart.draw_partition(setups)
    monkeypatch.setattr(client_table, "MOST_CLIENTS", 3)
    cut = partition_chart.draw_partition(setups)
    assert whole is not None
    assert cut is not None
    assert (len(whole.figure.axes[0].patches), whole.note) == (4, "")
    assert len(cut.figure.axes[0].patches) == 3
    assert cut.alternative == whole.alternative
    expected = "Drawn are 3 of the 4 clients: a sample by the SHA-256 of their names."
    assert cut.note == expected


def split_drawn(run: Path, names: Sequence[str], num_clients: int) -> DescribedChart:
    """Return the picture of clients with one example of each label."""
    ones, nothing = (1,) * len(names), (0,) * len(names)
    clients = (ClientCounts("0", True, ones, nothing, nothing),) * num_clients
    counts = asdict(LabelCounts(tuple(names), clients))
    (run / "partition.json").write_text(json.dumps(counts))
    picture = partition_chart.draw_partition(setups(run))
    assert picture is not None
    return picture


def test_many_clients_are_not_all_named(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    cells = split_drawn(run, ["cat", "dog"], 161).figure.axes[1]
    assert len(cells.get_xticklabels()) == 54  # of 161 every third
    assert cells.get_xlabel().endswith("one in 3 is named")


def test_labels_are_drawn_literally_and_not_all_named(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    svg = as_svg(split_drawn(run, ["$10 to $20_", "bell\x07"], 1), "split")
    assert "$10 to $20_" in svg
    assert ">bell <" in svg
    names = [f"label {number}" for number in range(62)]
    figure = split_drawn(run, names, 2).figure
    named = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert named == names[::3]
