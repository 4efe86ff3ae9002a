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

from knnper.errors import RunError
from knnper.simulation.batches.outputs import (
    best_points,
    chosen_sweep,
    plot_of,
    write_batch,
)
from knnper.simulation.batches.plan import TERMS, Comparison, Sweep, read_sweep
from knnper.simulation.batches.runner import Outcome
from knnper.simulation.batches.tables import (
    COLUMNS,
    Row,
    csv_of,
    documents_of,
    rows_of,
    table_of,
)
from knnper.simulation.reports.runs import csv_text, estimate
from tests.simulation.batches.small_comparison import ROWS, plan
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


# The table of a comparison: means, deviations and who is degraded.


class TestTableComparisonTable:
    """Figures of runs that are written by hand."""

    @pytest.fixture
    def comparison(self, tmp_path: Path) -> Comparison:
        other = {**ROWS["mean"], "title": "Other"}
        return plan(tmp_path, rows={"mean": ROWS["mean"], "other": other})

    @pytest.fixture
    def outcomes(self, tmp_path: Path, comparison: Comparison) -> list[Outcome]:
        accuracies = {"mean": (0.5, 0.7), "other": (0.4, 0.8)}
        return [
            Outcome(
                comparison.variants[name][1],
                {
                    seed: self.run(tmp_path / f"{name}-{seed}", seed, accuracy)
                    for seed, accuracy in enumerate(both, start=1)
                },
            )
            for name, both in accuracies.items()
        ]

    def run(self, folder: Path, seed: int, accuracy: float) -> Path:
        folder.mkdir()
        results = {
            "seen": {"accuracy_weighted": accuracy, "accuracy_bottom_decile": 0.25},
            "unseen": {"accuracy_weighted": None, "accuracy_bottom_decile": None},
            "training": {"seconds": 2.0 * seed, "personalization_seconds": 1.0},
        }
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "clients.csv").write_text(
            "client,seen,num_test,accuracy,accuracy_global\n"
            f"a,true,2,{accuracy},0\nb,true,2,0.5,0\nc,true,0,,\n"
        )
        return folder

    def test_means_and_deviations(
        self, comparison: Comparison, outcomes: list[Outcome]
    ) -> None:
        rows = rows_of(comparison, outcomes)
        mean, other = documents_of(comparison, outcomes, rows)
        # ((0.5 - 0.6)² + (0.7 - 0.6)²) / (2 - 1) = 0.02
        assert mean["seen"]["average"]["mean"] == pytest.approx(0.6)
        assert mean["seen"]["average"]["std"] == pytest.approx(0.02**0.5)
        assert mean["unseen"]["average"]["mean"] is None
        assert mean["seconds"] == pytest.approx(4.0)
        # Of a and b, a is worse with seed 1 (0.4 < 0.5) and not with seed 2.
        assert other["seen"]["fraction_degraded"]["mean"] == pytest.approx(0.25)
        assert mean["seen"]["fraction_degraded"]["mean"] == 0

    def test_it_is_written_in_percent(
        self, comparison: Comparison, outcomes: list[Outcome]
    ) -> None:
        table = table_of(comparison, rows_of(comparison, outcomes))
        first, second = table.rows
        assert table.header[3] == "degraded vs FedAvg"
        assert first[:4] == ("FedAvg", "60.0 ± 14.1", "25.0 ± 0.0", "0.0 ± 0.0")
        assert second[3:5] == ("25.0 ± 35.4", "-")

    def test_the_csv_has_every_figure(
        self, comparison: Comparison, outcomes: list[Outcome]
    ) -> None:
        text = csv_of(comparison, outcomes, rows_of(comparison, outcomes))
        first, second = csv.DictReader(io.StringIO(text))
        assert first["row"] == "mean"
        assert float(second["seen_fraction_degraded"]) == pytest.approx(0.25)
        assert second["unseen_average"] == ""
        # 12.706 = t of 97.5 % with 1 degree of freedom: t · √0.02 / √2.
        half_width = float(first["seen_average_half_width"])
        assert half_width == pytest.approx(12.706 * 0.1, abs=1e-3)
        assert json.loads(first["chosen"]) == {"training.learning_rate": 0.1}

    def test_what_is_behind_the_sign_is_told_where_there_is_one(
        self, tmp_path: Path, comparison: Comparison, outcomes: list[Outcome]
    ) -> None:
        rows = rows_of(comparison, outcomes)
        shown = write_batch(comparison, outcomes, rows, tmp_path)
        *_, empty, last = (tmp_path / "table.md").read_text().splitlines()
        assert (empty, last) == ("", shown.remarks[0])
        assert "± is the standard deviation over 2 seeds" in last
        alone = [replace(one, runs={1: one.runs[1]}) for one in outcomes]
        rows = rows_of(comparison, alone)
        shown = write_batch(comparison, alone, rows, tmp_path)
        assert not any("±" in remark for remark in shown.remarks)
        assert "±" not in (tmp_path / "table.md").read_text()

    @pytest.mark.parametrize("content", [None, "client,seen\na,true\n"])
    def test_what_to_delete_where_clients_are_lost(
        self, comparison: Comparison, outcomes: list[Outcome], content: str | None
    ) -> None:
        run = outcomes[0].runs[2]
        (run / "clients.csv").unlink()
        if content is not None:
            (run / "clients.csv").write_text(content)
        with pytest.raises(RunError, match=f"missing or damaged, .* Delete {run}, and"):
            rows_of(comparison, outcomes)
