"""Tables, plots and the choice, from figures that are written by hand."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from knnper.errors import ConfigError, RunError
from knnper.simulation.batches import tables
from knnper.simulation.batches.choice import (
    best_points,
    chosen_sweep,
)
from knnper.simulation.batches.comparison import Comparison
from knnper.simulation.batches.figure_names import (
    BYTES,
    SECONDS,
    all_columns,
    versus,
)
from knnper.simulation.batches.plot import plot_of
from knnper.simulation.batches.runner import Outcome
from knnper.simulation.batches.sweep import (
    Sweep,
    read_sweep,
)
from knnper.simulation.batches.tables import (
    PointRow,
    compared_run_rows,
    csv_of,
    documents_of,
    rows_of,
    table_of,
)
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.table import csv_text
from tests.simulation.batches.small_comparison import ROWS, plan
from tests.simulation.batches.small_sweep import BASE, NEIGHBORS, read

RATE = "training.learning_rate"
# t of 2 degrees of freedom at 97.5 %, from a table; s = 0.1 of 0.5, 0.6 and 0.7.
HALF = 4.302653 * 0.1 / 3**0.5
TWO: dict[str, Any] = {"a": {}, "b": {"model": {"embedding_dim": 8}}}


def row(
    values: Mapping[str, Any],
    figures: Mapping[str, Sequence[float | None]],
    variant: str = "alone",
) -> PointRow:
    estimates = {column: estimate(figures.get(column, ())) for column in all_columns()}
    return PointRow(variant, variant.upper(), values, 3, 0, estimates)


def right(
    values: Mapping[str, Any], accuracy: float, variant: str = "alone"
) -> PointRow:
    return row(values, {"seen.accuracy_weighted": [accuracy]}, variant)


def rows(*accuracies: Sequence[float | None]) -> list[PointRow]:
    return [
        row({NEIGHBORS: place}, {"seen.accuracy_weighted": accuracy})
        for place, accuracy in zip((1, 5), accuracies, strict=False)
    ]


def cells(sweep: Sweep, shown_rows: Sequence[PointRow]) -> list[list[str]]:
    table = table_of(sweep, shown_rows)
    return [list(table.header), *map(list, table.rows)]


# Means, deviations and intervals over the seeds.


def test_the_interval_is_students(tmp_path: Path) -> None:
    sweep = read(tmp_path, seeds=[0, 1, 2])
    _, one, _ = cells(sweep, rows([0.5, 0.6, 0.7], [0.5]))
    # Mean 0.6, half width t · 0.1 / √3 = 0.2484.
    assert pytest.approx(0.2484, abs=1e-4) == HALF
    assert one == ["1", "60.0", "10.0", "35.2 to 84.8", "-", "-", "-", "3"]


def test_the_interval_ends_where_fractions_end(tmp_path: Path) -> None:
    sweep = read(tmp_path, seeds=[0, 1])
    _, high, low = cells(sweep, rows([0.8, 0.9], [0.1, 0.2]))
    # t = 12.7 with one degree of freedom: the half width is 63.5 points.
    assert [high[3], low[3]] == ["21.5 to 100.0*", "0.0 to 78.5*"]


def test_of_one_seed_there_is_no_interval(tmp_path: Path) -> None:
    header, *lines = cells(read(tmp_path), rows([0.5], [0.25]))
    assert header[:4] == ["k", "accuracy", "sd", "95 % interval"]
    assert [line[1:4] for line in lines] == [["50.0", "-", "-"], ["25.0", "-", "-"]]


def test_the_csv_of_a_sweep_has_every_figure(tmp_path: Path) -> None:
    sweep = read(tmp_path)
    outcomes = [Outcome(sweep.points[0], {})]
    text = csv_of(sweep, outcomes, rows([0.5, 0.6, 0.7]))
    (line,) = csv.DictReader(io.StringIO(text))
    assert line[NEIGHBORS] == "1"
    name = "seen.accuracy_weighted"
    three = [float(line[name + end]) for end in ("", ".sd", ".half_width")]
    assert three == pytest.approx([0.6, 0.1, HALF], rel=1e-6)
    assert line["unseen.global.ece"] == ""


def test_other_figures_and_groups_are_shown(tmp_path: Path) -> None:
    sweep = read(tmp_path, y="global.log_loss", group="unseen")
    shown_row = row({NEIGHBORS: 1}, {"unseen.global.log_loss": [0.25]})
    header, line = cells(sweep, [shown_row])
    assert (header[1], line[1]) == ("global model's log-loss", "0.25")


def test_a_row_of_a_failed_run_has_empty_cells() -> None:
    text = csv_text([{"seed": 1}, {"seed": 2, "figure": 0.5, "list": [1]}])
    assert text.splitlines() == ["seed,figure,list", "1,,", "2,0.5,[1]"]


# What is drawn is what the rows say.


def drawn(sweep: Sweep, found: Sequence[PointRow]) -> Figure:
    figure = plot_of(found, sweep.settings)
    assert figure is not None
    return figure


def axes_of(sweep: Sweep, found: Sequence[PointRow]) -> Axes:
    (axes,) = drawn(sweep, found).axes
    return axes


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def test_curves_and_bars(tmp_path: Path) -> None:
    sweep = read(tmp_path, x=NEIGHBORS)
    axes = axes_of(sweep, rows([0.5, 0.6, 0.7], [0.8, 0.8, 0.8]))
    (bars,) = axes.containers
    curve, _, (segments,) = bars
    assert np.allclose(curve.get_xdata(), [1, 5])
    assert np.allclose(curve.get_ydata(), [0.6, 0.8])
    (_, low), (_, high) = segments.get_segments()[0]
    assert (low, high) == pytest.approx((0.6 - HALF, 0.6 + HALF))
    labels = (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale())
    assert labels == ("k", "accuracy, seen clients", "linear")
    assert names(axes) == ["1", "5"]


def test_series_are_curves_of_their_own(tmp_path: Path) -> None:
    grid = {RATE: [0.1], NEIGHBORS: [1, 500]}
    series = ["variant", RATE]
    sweep = read(tmp_path, x=NEIGHBORS, series=series, grid=grid, variants=TWO)
    points = [
        right({RATE: 0.1, NEIGHBORS: place}, 0.5, variant)
        for variant in TWO
        for place in (1, 500)
    ]
    axes = axes_of(sweep, points)
    (legend,) = axes.figure.legends
    assert legend.get_title().get_text() == "variant,\nlearning rate"
    assert [text.get_text() for text in legend.get_texts()] == ["A, 0.1", "B, 0.1"]
    assert axes.get_xscale() == "log"


def test_names_are_drawn_literally(tmp_path: Path) -> None:
    title = "cost $x_1 to $y\x07"
    variants = {"a": {"title": title}, "b": TWO["b"]}
    sweep = read(tmp_path, variants=variants, grid={NEIGHBORS: [1]}, x="variant")
    first, second = (right({NEIGHBORS: 1}, 0.4, name) for name in variants)
    svg = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        points = [replace(first, title=title), second]
        drawn(sweep, points).savefig(svg, format="svg")
    assert "cost $x_1 to $y" in svg.getvalue()
    ElementTree.fromstring(svg.getvalue())


def test_without_x_or_figures_there_is_no_plot(tmp_path: Path) -> None:
    assert plot_of(rows([0.5]), read(tmp_path).settings) is None
    assert plot_of(rows([]), read(tmp_path, x=NEIGHBORS).settings) is None


# The best on validation data, and the file that tests it.


def test_the_best_with_every_seed_is_chosen(tmp_path: Path) -> None:
    sweep = read(tmp_path, evaluate_on="validation")
    best, good = rows([0.6, 0.6], [0.5, 0.5])
    assert best_points(sweep, [good, best]) == [best]
    (lucky,) = rows([0.9, None])
    assert best_points(sweep, [lucky, best]) == [best]
    first, second = rows([0.5, 0.7], [0.6, 0.6])
    assert best_points(sweep, [first, second]) == [first]
    assert best_points(sweep, [second, first]) == [second]
    # A loss is better when it is small.
    sweep = read(tmp_path, y="log_loss")
    losses = [row({}, {"seen.log_loss": [loss, loss]}) for loss in (2.0, 1.0)]
    assert best_points(sweep, losses) == [losses[1]]


def again(sweep: Sweep, values: Mapping[str, Any], tmp_path: Path) -> Sweep:
    """Return the sweep that tests these values of each variant."""
    path = tmp_path / "chosen.yaml"
    best = [row(values, {}, name) for name in sweep.settings.variants]
    path.write_text(chosen_sweep(sweep, best))
    return read_sweep(path)


def test_the_chosen_file_tests_the_best(tmp_path: Path) -> None:
    sweep = read(
        tmp_path,
        "training.batch_size=8",
        evaluate_on="validation",
        grid={"training.momentum": [0.0, 0.5]},
        variants={"a": {"method": {"name": "fedavg"}}, "b": {"set": {RATE: 0.5}}},
        set={"training.num_rounds": 3},
    )
    repeated = again(sweep, {"training.momentum": 0.5}, tmp_path)
    assert [point.variant for point in repeated.points] == ["a", "b"]
    a, b = (point.runs[1] for point in repeated.points)
    assert (a.method.name, b.method.name) == ("fedavg", "knn_per")
    assert (a.training.learning_rate, b.training.learning_rate) == (0.1, 0.5)
    for path in (a, b):
        training = path.training
        found_in = (training.momentum, training.num_rounds, training.batch_size)
        assert found_in == (0.5, 3, 8)
        assert path.partition.settings.evaluate_on == "test"  # type: ignore[attr-defined]


def test_an_empty_personalization_stays_the_methods_own(tmp_path: Path) -> None:
    partition = {**BASE["partition"], "validation_fraction": 0.2}
    base = {**BASE, "partition": partition, "personalization": {"num_neighbors": 3}}
    variants: dict[str, Any] = {
        "own": {"personalization": {}},
        "five": {"personalization": {"num_neighbors": 5}},
        "bases": {"training": {"momentum": 0.5}},
    }
    sweep = read(tmp_path, base=base, grid={}, variants=variants)
    repeated = again(sweep, {}, tmp_path)
    text = (tmp_path / "chosen.yaml").read_text()
    assert "model" not in text.partition("variants:")[2]
    before, after = (
        [point.runs[1].personalization for point in sweep_again.points]
        for sweep_again in (sweep, repeated)
    )
    assert before == after
    numbers = [settings.settings.num_neighbors for settings in after]  # type: ignore[attr-defined]
    assert numbers == [10, 5, 3]


def test_variants_are_compared_with_one_of_them_seed_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants: dict[str, Any] = {"own": {}, "five": {"title": "with five"}}
    variants["five"]["personalization"] = {"num_neighbors": 5}
    grid = {"training.num_rounds": [1, 2]}
    references = ["own", "five"]
    sweep = read(tmp_path, variants=variants, reference=references, grid=grid)
    accuracies = {
        ("own", 1): (0.5, 0.7), ("own", 2): (0.1, 0.2),
        ("five", 1): (0.6, 0.9), ("five", 2): (0.0, 0.1),
    }  # fmt: skip
    places = [
        (point.variant, point.values["training.num_rounds"]) for point in sweep.points
    ]
    results = [
        Outcome(point, {seed: Path(f"{at}-{seed}") for seed in (1, 2)})
        for at, point in enumerate(sweep.points)
    ]

    def figures_of(run: Path) -> dict[str, float]:
        at, seed = map(int, run.name.split("-"))
        return dict.fromkeys(all_columns(), accuracies[places[at]][seed - 1])

    monkeypatch.setattr(tables, "figures_of", figures_of)
    monkeypatch.setattr(
        tables, "_costs_of", lambda _: dict.fromkeys((SECONDS, *BYTES), 0.0)
    )
    rows = rows_of(sweep, results)
    for reference, expected in (
        ("own", [0, 0, 0.15, -0.1]),
        ("five", [-0.15, 0.1, 0, 0]),
    ):
        column = versus("all.accuracy_weighted", reference)
        assert [row.estimates[column].mean for row in rows] == pytest.approx(expected)
    table = table_of(sweep, rows)
    at = table.header.index("vs own")
    # The differences 0.1 and 0.2: t · 0.0707 / √2 = 0.635.
    assert [line[at] for line in table.rows[2:]] == ["+15.0 ± 63.5*", "-10.0 ± 0.0*"]
    with pytest.raises(ConfigError, match="found 'on', which is no variant"):
        read(tmp_path, variants=variants, reference="on", grid=grid)
    with pytest.raises(ConfigError, match="expected each one once"):
        read(tmp_path, variants=variants, reference=["own", "own"], grid=grid)


# The table of a comparison: means, deviations and who is degraded.


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    other = {**ROWS["mean"], "title": "Other"}
    rows = {"mean": ROWS["mean"], "other": other}
    return plan(tmp_path, rows=rows, reference=["mean", "other"])


@pytest.fixture
def outcomes(tmp_path: Path, comparison: Comparison) -> list[Outcome]:
    accuracies = {"mean": (0.5, 0.7), "other": (0.4, 0.8)}
    return [
        Outcome(
            comparison.variants[name][1],
            {
                seed: made(tmp_path / f"{name}-{seed}", seed, accuracy)
                for seed, accuracy in enumerate(both, start=1)
            },
        )
        for name, both in accuracies.items()
    ]


def made(folder: Path, seed: int, accuracy: float) -> Path:
    folder.mkdir()
    results: dict[str, Any] = {
        "seen": {"accuracy_weighted": accuracy, "accuracy_bottom_decile": 0.25},
        "unseen": {"accuracy_weighted": None, "accuracy_bottom_decile": None},
        "training": {"seconds": 2.0 * seed, "personalization_seconds": 1.0},
        "method": "fedavg",
        "manifest": {
            "partition_hash": f"{seed}" * 64,
            "num_cpus": 2,
            "versions": {"torch": "2.9"},
        },
    }
    for group in ("seen", "unseen"):
        results[group]["num_clients"] = 3
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "experiment.yaml").touch()
    commit = "\n50f3a71eca7a" if seed == 1 else ""
    (folder / "code.txt").write_text("a" * 64 + commit)
    (folder / "rounds.jsonl").write_text(
        '{"server_round": 1, "num_clients": 3, "num_failed": 1, '
        '"bytes_down": 40, "bytes_up": 24}\n'
        '{"server_round": 2, "num_clients": 1, "num_failed": 0, '
        '"bytes_down": 10, "bytes_up": 8}\n'
    )
    (folder / "clients.csv").write_text(
        "client,seen,num_test,accuracy,accuracy_global\n"
        f"a,true,2,{accuracy},0\nb,true,2,0.5,0\nc,true,0,,\n"
    )
    return folder


def test_a_comparison_by_hand(comparison: Comparison, outcomes: list[Outcome]) -> None:
    compared = rows_of(comparison, outcomes)
    mean, other = documents_of(comparison, outcomes, compared)
    # ((0.5 - 0.6)² + (0.7 - 0.6)²) / (2 - 1) = 0.02
    average = mean["seen"]["average"]
    assert (average["mean"], average["std"]) == pytest.approx((0.6, 0.02**0.5))
    assert mean["unseen"]["average"]["mean"] is None
    assert mean["seconds"] == pytest.approx(4.0)
    # Of a and b, a is worse with seed 1 (0.4 < 0.5) and not with seed 2.
    assert other["seen"]["fraction_degraded"]["mean"] == pytest.approx(0.25)
    assert mean["seen"]["fraction_degraded"]["mean"] == 0
    table = table_of(comparison, compared)
    first, second = table.rows
    header = ("vs FedAvg", "vs Other", "bottom decile", "degraded vs FedAvg")
    assert table.header[2:6] == header
    # 12.706 = t of 97.5 % with 1 degree of freedom: t · √0.02 / √2 = 1.2706.
    assert first[:3] == ("FedAvg", "60.0 ± 127.1*", "0.0 ± 0.0*")
    assert first[3].lstrip("+-") == "0.0 ± 127.1*"
    # The differences -0.1 and 0.1 of the two seeds.
    assert second[1] == "60.0 ± 254.1*"
    assert second[2].lstrip("+-") == "0.0 ± 127.1*"
    assert second[5:7] == ("25.0 ± 317.7*", "-")
    text = csv_of(comparison, outcomes, compared)
    first_line, second_line = csv.DictReader(io.StringIO(text))
    assert first_line["row"] == "mean"
    assert float(second_line["seen_fraction_degraded"]) == pytest.approx(0.25)
    assert second_line["unseen_average"] == ""
    half_width = float(first_line["seen_average_half_width"])
    assert half_width == pytest.approx(12.706 * 0.1, abs=1e-3)
    assert json.loads(first_line["chosen"]) == {"training.learning_rate": 0.1}
    half_width = float(second_line["seen_vs_mean_half_width"])
    assert half_width == pytest.approx(12.706 * 0.1, abs=1e-3)
    # 50 bytes to five clients, 32 from the four that replied.
    assert (first_line["bytes_down"], first_line["bytes_up"]) == ("10.0", "8.0")
    assert (first_line["batch"], first_line["seeds"]) == ("small", "1 2")
    assert first_line["splits"] == f"{'1' * 12} {'2' * 12}"
    assert first_line["hardware"] == "2 CPU cores; torch 2.9"
    assert first_line["code"] == "commit 50f3a71eca7a; files aaaaaaaaaaaa"


def test_points_of_a_comparison_have_each_seed(
    comparison: Comparison, outcomes: list[Outcome]
) -> None:
    failed = replace(outcomes[1], runs={1: outcomes[1].runs[1]}, failures={2: "why"})
    both = [outcomes[0], failed]
    lines = compared_run_rows(comparison, both, rows_of(comparison, both))
    table = list(csv.DictReader(io.StringIO(csv_text(lines))))
    columns = ("row", "seed", "run", "seen_average", "seen_vs_mean", "failure")
    assert [tuple(row[name] for name in columns[:4]) for row in table] == [
        ("mean", "1", "mean-1", "0.5"),
        ("mean", "2", "mean-2", "0.7"),
        ("other", "1", "other-1", "0.4"),
        ("other", "2", "", ""),
    ]
    assert float(table[2]["seen_vs_mean"]) == pytest.approx(-0.1)
    assert table[3]["failure"] == "why"
    assert table[0]["code"] == "commit 50f3a71eca7a"
    assert (table[1]["seconds"], table[1]["bytes_up"]) == ("5.0", "8.0")


@pytest.mark.parametrize("content", [None, "client,seen\na,true\n"])
def test_what_to_delete_where_clients_are_lost(
    comparison: Comparison, outcomes: list[Outcome], content: str | None
) -> None:
    run = outcomes[0].runs[2]
    (run / "clients.csv").unlink()
    if content is not None:
        (run / "clients.csv").write_text(content)
    with pytest.raises(RunError, match=f"missing or damaged, .* Delete {run}, and"):
        rows_of(comparison, outcomes)
