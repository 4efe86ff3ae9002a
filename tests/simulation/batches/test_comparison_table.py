"""The table of a comparison: means, deviations and who is degraded."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.simulation.batches.outputs import write_batch
from knnper.simulation.batches.plan import Comparison
from knnper.simulation.batches.runner import Outcome
from knnper.simulation.batches.tables import csv_of, documents_of, rows_of, table_of
from tests.simulation.batches.small_comparison import ROWS, plan


class TestTable:
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
