"""Tables, plots and the choice, from figures that are written by hand."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes

from knnper.simulation.batches.outputs import best_points, chosen_sweep
from knnper.simulation.batches.plan import TERMS, Sweep, read_sweep
from knnper.simulation.batches.plot import plot_of
from knnper.simulation.batches.tables import COLUMNS, Row, csv_of, csv_text, table_of
from knnper.simulation.reports.runs import estimate
from tests.simulation.batches.small_sweep import BASE, NEIGHBORS, read

RATE = "training.learning_rate"
# t of 2 degrees of freedom at 97.5 %, from a table.
T2 = 4.302653


def row(
    values: Mapping[str, Any],
    figures: Mapping[str, Sequence[float | None]],
    variant: str = "alone",
) -> Row:
    estimates = {column: estimate(figures.get(column, ())) for column in COLUMNS}
    return Row(variant, variant.upper(), values, 3, 0, estimates)


def rows(*accuracies: Sequence[float | None], **others: Any) -> list[Row]:
    return [
        row({NEIGHBORS: place}, {"seen.accuracy_weighted": accuracy, **others})
        for place, accuracy in zip((1, 5), accuracies, strict=False)
    ]


def cells(sweep: Sweep, found: Sequence[Row]) -> list[list[str]]:
    table = table_of(sweep, found)
    return [list(table.header), *map(list, table.rows)]


class TestTable:
    """Means, deviations and intervals over the seeds."""

    def test_the_interval_is_students(self, tmp_path: Path) -> None:
        sweep = read(tmp_path, seeds=[0, 1, 2])
        _, one, _ = cells(sweep, rows([0.5, 0.6, 0.7], [0.5]))
        # Mean 0.6, s = 0.1, half width t · 0.1 / √3 = 0.2484.
        half = T2 * 0.1 / 3**0.5
        assert half == pytest.approx(0.2484, abs=1e-4)
        assert one == ["1", "60.0", "10.0", "35.2 to 84.8", "-", "-", "-", "3"]

    def test_the_interval_ends_where_fractions_end(self, tmp_path: Path) -> None:
        sweep = read(tmp_path, seeds=[0, 1])
        _, high, low = cells(sweep, rows([0.8, 0.9], [0.1, 0.2]))
        # t = 12.7 with one degree of freedom: the half width is 63.5 points.
        assert [high[3], low[3]] == ["21.5 to 100.0", "0.0 to 78.5"]

    def test_of_one_seed_there_is_no_interval(self, tmp_path: Path) -> None:
        header, *_ = lines = cells(read(tmp_path), rows([0.5], [0.25]))
        assert header[:4] == ["k", "accuracy", "sd", "95 % interval"]
        assert [line[1:4] for line in lines[1:]] == [
            ["50.0", "-", "-"],
            ["25.0", "-", "-"],
        ]

    def test_a_setting_without_a_word_keeps_its_key(self, tmp_path: Path) -> None:
        key = "model.embedding_dim"
        sweep = read(tmp_path, vary={key: [4]})
        header, _ = cells(sweep, [row({key: 4}, {})])
        assert header[0] == key

    def test_no_two_settings_have_one_word(self) -> None:
        assert len(set(TERMS.values())) == len(TERMS)

    def test_the_csv_has_every_figure(self, tmp_path: Path) -> None:
        text = csv_of(read(tmp_path), [], rows([0.5, 0.6, 0.7]))
        (found,) = csv.DictReader(io.StringIO(text))
        assert found[NEIGHBORS] == "1"
        assert float(found["seen.accuracy_weighted"]) == pytest.approx(0.6)
        assert float(found["seen.accuracy_weighted.sd"]) == pytest.approx(0.1)
        half = float(found["seen.accuracy_weighted.half_width"])
        assert half == pytest.approx(T2 * 0.1 / 3**0.5, rel=1e-6)
        assert found["unseen.global.ece"] == ""

    def test_other_figures_and_groups_are_shown_by_their_names(
        self, tmp_path: Path
    ) -> None:
        sweep = read(tmp_path, y="global.log_loss", group="unseen")
        one = row({NEIGHBORS: 1}, {"unseen.global.log_loss": [0.25]})
        header, line = cells(sweep, [one])
        assert header[1] == "global model's log-loss"
        assert line[1] == "0.25"

    def test_a_row_of_a_failed_run_has_empty_cells(self) -> None:
        text = csv_text([{"seed": 1}, {"seed": 2, "figure": 0.5, "list": [1]}])
        assert text.splitlines() == ["seed,figure,list", "1,,", "2,0.5,[1]"]


class TestPlot:
    """What is drawn is what the rows say."""

    def axes(self, sweep: Sweep, found: Sequence[Row]) -> Axes:
        figure = plot_of(found, sweep.settings)
        assert figure is not None
        (axes,) = figure.axes
        return axes

    def test_curves_and_bars(self, tmp_path: Path) -> None:
        sweep = read(tmp_path, x=NEIGHBORS)
        axes = self.axes(sweep, rows([0.5, 0.6, 0.7], [0.8, 0.8, 0.8]))
        (bars,) = axes.containers
        curve, _, (segments,) = bars
        assert np.allclose(curve.get_xdata(), [1, 5])
        assert np.allclose(curve.get_ydata(), [0.6, 0.8])
        half = T2 * 0.1 / 3**0.5
        (_, low), (_, high) = segments.get_segments()[0]
        assert (low, high) == pytest.approx((0.6 - half, 0.6 + half))
        assert axes.get_xlabel() == "k"
        assert axes.get_ylabel() == "accuracy, seen clients"
        assert axes.get_xscale() == "linear"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "5"]

    def test_series_are_curves_of_their_own(self, tmp_path: Path) -> None:
        sweep = read(
            tmp_path,
            x=NEIGHBORS,
            series=["variant", RATE],
            vary={RATE: [0.1], NEIGHBORS: [1, 500]},
            variants={"a": {}, "b": {"model": {"embedding_dim": 8}}},
        )
        found = [
            row(
                {RATE: 0.1, NEIGHBORS: place},
                {"seen.accuracy_weighted": [0.5]},
                variant,
            )
            for variant in "ab"
            for place in (1, 500)
        ]
        axes = self.axes(sweep, found)
        (legend,) = axes.figure.legends
        assert legend.get_title().get_text() == "variant,\nlearning rate"
        assert [text.get_text() for text in legend.get_texts()] == ["A, 0.1", "B, 0.1"]
        assert axes.get_xscale() == "log"

    def test_names_are_dots_side_by_side(self, tmp_path: Path) -> None:
        variants = {"a": {}, "b": {"model": {"embedding_dim": 8}}}
        sweep = read(tmp_path, x="variant", vary={}, variants=variants)
        found = [
            row({}, {"seen.accuracy_weighted": [value]}, variant)
            for variant, value in (("a", 0.4), ("b", 0.6))
        ]
        axes = self.axes(sweep, found)
        assert [text.get_text() for text in axes.get_xticklabels()] == ["A", "B"]
        curve = axes.containers[0][0]
        assert curve.get_linestyle() == "None"
        assert np.allclose(curve.get_ydata(), [0.4, 0.6])

    def test_names_are_drawn_literally(self, tmp_path: Path) -> None:
        title = "cost $x_1 to $y\x07"
        variants = {"a": {"title": title}, "b": {"model": {"embedding_dim": 8}}}
        for axis in ({"x": "variant"}, {"x": NEIGHBORS, "series": "variant"}):
            sweep = read(tmp_path, variants=variants, vary={NEIGHBORS: [1]}, **axis)
            points = [
                row({NEIGHBORS: 1}, {"seen.accuracy_weighted": [value]}, name)
                for name, value in (("a", 0.4), ("b", 0.6))
            ]
            points[0] = replace(points[0], title=title)
            figure = plot_of(points, sweep.settings)
            assert figure is not None
            svg = io.StringIO()
            with rc_context({"svg.fonttype": "none"}):
                figure.savefig(svg, format="svg")
            assert "cost $x_1 to $y" in svg.getvalue()
            ElementTree.fromstring(svg.getvalue())

    def test_random_points_are_not_joined(self, tmp_path: Path) -> None:
        keys = {RATE: [0.1, 0.2], NEIGHBORS: {"low": 1, "high": 9}}
        random = {"num_points": 2, "keys": keys}
        sweep = read(tmp_path, vary={}, random=random, x=NEIGHBORS)
        axes = self.axes(sweep, rows([0.5], [0.6]))
        assert axes.containers[0][0].get_linestyle() == "None"

    def test_without_x_or_figures_there_is_none(self, tmp_path: Path) -> None:
        assert plot_of(rows([0.5]), read(tmp_path).settings) is None
        assert plot_of(rows([]), read(tmp_path, x=NEIGHBORS).settings) is None


class TestChoice:
    """The best on validation data, and the file that tests it."""

    def test_the_best_with_every_seed_is_chosen(self, tmp_path: Path) -> None:
        sweep = read(tmp_path, evaluate_on="validation")
        best, good = rows([0.6, 0.6], [0.5, 0.5])
        assert best_points(sweep, [good, best]) == [best]
        (lucky,) = rows([0.9, None])
        assert best_points(sweep, [lucky, best]) == [best]
        first, second = rows([0.5, 0.7], [0.6, 0.6])
        assert best_points(sweep, [first, second]) == [first]
        assert best_points(sweep, [second, first]) == [second]

    def test_a_loss_is_better_when_it_is_small(self, tmp_path: Path) -> None:
        sweep = read(tmp_path, y="log_loss")
        points = [
            row({RATE: 0.1, NEIGHBORS: place}, {"seen.log_loss": [loss, loss]})
            for place, loss in ((1, 2.0), (5, 1.0))
        ]
        assert best_points(sweep, points) == [points[1]]

    def test_the_chosen_file_tests_the_best(self, tmp_path: Path) -> None:
        variants = {"a": {"method": {"name": "fedavg"}}, "b": {"set": {RATE: 0.5}}}
        sweep = read(
            tmp_path,
            "training.batch_size=8",
            evaluate_on="validation",
            vary={"training.momentum": [0.0, 0.5]},
            variants=variants,
            set={"training.num_rounds": 3},
        )
        best = [row({"training.momentum": 0.5}, {}, name) for name in variants]
        path = tmp_path / "chosen.yaml"
        path.write_text(chosen_sweep(sweep, best))
        again = read_sweep(path)
        assert [point.variant for point in again.points] == ["a", "b"]
        a, b = (point.runs[1] for point in again.points)
        assert (a.method.name, b.method.name) == ("fedavg", "knn_per")
        assert (a.training.learning_rate, b.training.learning_rate) == (0.1, 0.5)
        for experiment in (a, b):
            assert experiment.training.momentum == 0.5
            assert experiment.training.num_rounds == 3
            assert experiment.training.batch_size == 8
            assert experiment.partition.settings.evaluate_on == "test"  # type: ignore[attr-defined]

    def test_an_empty_personalization_stays_the_methods_own(
        self, tmp_path: Path
    ) -> None:
        partition = {**BASE["partition"], "validation_fraction": 0.2}
        base = {**BASE, "partition": partition, "personalization": {"num_neighbors": 3}}
        variants: dict[str, Any] = {
            "own": {"personalization": {}},
            "five": {"personalization": {"num_neighbors": 5}},
            "bases": {"training": {"momentum": 0.5}},
        }
        sweep = read(tmp_path, base=base, vary={}, variants=variants)
        best = [row({}, {}, name) for name in variants]
        path = tmp_path / "chosen.yaml"
        path.write_text(chosen_sweep(sweep, best))
        again = read_sweep(path)
        assert "model" not in path.read_text().partition("variants:")[2]
        for one, other in zip(sweep.points, again.points, strict=True):
            chosen = other.runs[1].personalization
            assert chosen == one.runs[1].personalization
        numbers = [
            point.runs[1].personalization.settings.num_neighbors  # type: ignore[attr-defined]
            for point in again.points
        ]
        assert numbers == [10, 5, 3]
