"""The numbers of the charts, against a plain reading of the files of the runs."""

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.simulation.reports.charts import (
    draw_reliability,
    draw_scatters,
    draw_store_sizes,
    draw_weights,
    panels_of,
    scatters,
    size_classes,
    weight_counts,
)
from knnper.simulation.reports.figure import SERIES
from knnper.simulation.reports.runs import Setup, client_rows, load_run, setups_of
from tests.simulation.reporting.made_runs import client_result, made_run


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return two seeds of one setup, with clients that have no test examples."""
    clients = {seed: [client_result(n, seed) for n in range(40)] for seed in (0, 1)}
    assert any(one.personal.num_examples == 0 for one in clients[0])
    return [
        made_run(tmp_path / str(seed), found, seed=seed)
        for seed, found in clients.items()
    ]


@pytest.fixture
def setup(paths: list[Path]) -> Setup:
    (found,) = setups_of(map(load_run, paths))
    return found


@pytest.fixture
def rows(paths: list[Path]) -> list[dict[str, str]]:
    """Return the lines of all clients.csv whose client was tested."""
    return [row for path in paths for row in rows_of(path)]


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with (path / "clients.csv").open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["num_test"] != "0")


def test_scatter(setup: Setup, rows: list[dict[str, str]]) -> None:
    scatter = scatters([setup])["kNN-Per"]
    pairs = [(float(row["accuracy_global"]), float(row["accuracy"])) for row in rows]
    seen = [row["seen"] == "true" for row in rows]
    assert scatter.points == Counter(
        (group, *pair) for group, pair in zip(seen, pairs, strict=True)
    )
    assert scatter.num_better == sum(own > other for other, own in pairs) > 0
    assert scatter.num_equal == sum(own == other for other, own in pairs) > 0
    assert scatter.num_worse == sum(own < other for other, own in pairs) > 0


def test_size_classes(setup: Setup, rows: list[dict[str, str]]) -> None:
    classes = size_classes(client_rows(setup))
    assert 2 <= len(classes) <= 6
    assert sum(one.num_clients for one in classes) == len(rows)
    for before, after in itertools.pairwise(classes):
        assert before.largest < after.smallest
    for one in classes:
        inside = [
            row
            for row in rows
            if one.smallest <= float(row["num_stored"]) <= one.largest
        ]
        assert one.num_clients == len(inside)
        num_test = sum(int(row["num_test"]) for row in inside)
        for found, column in (
            (one.accuracy, "accuracy"),
            (one.accuracy_global, "accuracy_global"),
        ):
            right = sum(float(row[column]) * int(row["num_test"]) for row in inside)
            assert found == pytest.approx(right / num_test)


def test_memories_of_one_size_are_not_parted(setup: Setup) -> None:
    same = client_rows(setup)[:1] * 40
    (only,) = size_classes(same)
    assert only.smallest == only.largest == same[0].num_stored
    assert only.num_clients == 40
    assert size_classes([]) == []


def test_weights(setup: Setup, rows: list[dict[str, str]]) -> None:
    counts = weight_counts(client_rows(setup))
    assert counts is not None
    for group, found in (("true", counts.seen), ("false", counts.unseen)):
        chosen = Counter(
            round(20 * float(row["knn_weight"])) for row in rows if row["seen"] == group
        )
        assert found == tuple(chosen[place] for place in range(21))
    weights = [float(row["knn_weight"]) for row in rows]
    assert counts.mean == pytest.approx(sum(weights) / len(weights))


def test_reliability(setup: Setup, paths: list[Path]) -> None:
    lines = [
        json.loads(line)["result"]
        for path in paths
        for line in (path / "personalization.jsonl").read_text().splitlines()
    ]
    panels = panels_of([setup])
    assert [panel.group for panel in panels] == ["seen", "unseen"]
    for panel in panels:
        group = [one for one in lines if one["seen"] == (panel.group == "seen")]
        for found, key in ((panel.own, "personal"), (panel.reference, "reference")):
            assert found is not None
            assert sum(found.counts) == sum(one[key]["num_examples"] for one in group)
            assert found.counts == plain_bins(group, key, "bin_counts")
            right = plain_bins(group, key, "bin_correct")
            sure = plain_bins(group, key, "bin_confidence")
            assert found.accuracy == pytest.approx(divided(right, found.counts))
            assert found.confidence == pytest.approx(divided(sure, found.counts))
            gaps = sum(abs(a - b) for a, b in zip(right, sure, strict=True))
            assert found.calibration_error == pytest.approx(gaps / sum(found.counts))


def plain_bins(group: list[dict[str, Any]], key: str, name: str) -> tuple[Any, ...]:
    """Return sums over the clients of the bins that hold any example."""
    held = [
        place
        for place in range(15)
        if any(one[key]["bin_counts"][place] for one in group)
    ]
    return tuple(sum(one[key][name][place] for one in group) for place in held)


def divided(sums: tuple[Any, ...], counts: tuple[int, ...]) -> list[float]:
    return [one / count for one, count in zip(sums, counts, strict=True)]


def test_a_seed_alone_has_the_calibration_error_of_its_results(
    paths: list[Path],
) -> None:
    run = load_run(paths[0])
    for panel in panels_of(setups_of([run])):
        figures = run.results[panel.group]
        assert panel.own.calibration_error == pytest.approx(figures["ece"])
        assert panel.reference is not None
        assert panel.reference.calibration_error == pytest.approx(
            figures["global"]["ece"]
        )


def test_pictures_tell_their_numbers(setup: Setup) -> None:
    colors = {setup.label: SERIES[0]}
    told = [
        draw([setup], colors)
        for draw in (draw_scatters, draw_store_sizes, draw_weights, draw_reliability)
    ]
    alternatives = [picture.alternative for picture in told if picture]
    assert len(alternatives) == 4
    assert scatters([setup])[setup.label].verdict in alternatives[0]
    first = size_classes(client_rows(setup))[0]
    assert f"1 to {first.largest} examples" in alternatives[1]
    assert "kNN-Per: mean 0." in alternatives[2]
    assert "kNN-Per (seen): error" in alternatives[3]


def test_what_the_runs_lack_is_not_drawn(tmp_path: Path) -> None:
    clients = [client_result(number, own=False) for number in range(9)]
    path = made_run(tmp_path / "run", clients, method="fedavg", losses=())
    setups, colors = setups_of([load_run(path)]), {"FedAvg": SERIES[1]}
    assert draw_scatters(setups, colors) is None
    assert draw_store_sizes(setups, colors) is None
    assert draw_weights(setups, colors) is None
    (path / "personalization.jsonl").unlink()
    assert draw_reliability(setups, colors) is None
    (path / "clients.csv").unlink()
    assert client_rows(setups[0]) == []


def test_nothing_is_drawn_beside_a_model_that_means_nothing(tmp_path: Path) -> None:
    """Local's unpersonalised model is an untrained network."""
    setups = setups_of([load_run(made_run(tmp_path / "run", method="local"))])
    colors = {"Local": SERIES[1]}
    assert draw_scatters(setups, colors) is None
    assert [panel.reference for panel in panels_of(setups)] == [None, None]
    for draw, most in ((draw_reliability, 2), (draw_store_sizes, 1)):
        picture = draw(setups, colors)
        assert picture is not None
        assert "global" not in picture.alternative
        # The diagonal and the model's own line, or that line alone.
        assert {len(axes.lines) for axes in picture.figure.axes} == {most}


def test_bins_of_another_model_are_not_taken(paths: list[Path]) -> None:
    for path in paths:
        file = path / "personalization.jsonl"
        file.write_text(file.read_text().replace("5" * 64, "6" * 64))
    assert panels_of(setups_of(map(load_run, paths))) == []


def test_a_damaged_table_is_refused(paths: list[Path]) -> None:
    (paths[0] / "clients.csv").write_text("client,accuracy\na,0.5\n")
    with pytest.raises(RunError, match=r"clients\.csv is missing or damaged"):
        client_rows(setups_of(map(load_run, paths))[0])
