"""The table of a comparison: means, deviations and who is degraded."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.simulation.batches.tables import (
    Outcome,
    as_cells,
    as_csv,
    table_of,
    write_comparison,
)
from tests.simulation.comparison.small_plan import ROWS, plan


class TestTable:
    """Figures of runs that are written by hand."""

    def outcome(self, tmp_path: Path, name: str, accuracies: list[str]) -> Outcome:
        other = {**ROWS["mean"], "title": "Other"}
        comparison = plan(tmp_path, rows={"mean": ROWS["mean"], "other": other})
        (row,) = [row for row in comparison.rows if row.name == name]
        runs = {}
        for seed, accuracy in enumerate(accuracies, start=1):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            figures = {"accuracy_weighted": float(accuracy)}
            group = {**figures, "accuracy_bottom_decile": 0.25}
            nobody = {"accuracy_weighted": None, "accuracy_bottom_decile": None}
            results = {
                "seen": group,
                "unseen": nobody,
                "training": {"seconds": 2.0 * seed, "personalization_seconds": 1.0},
            }
            (folder / "results.json").write_text(json.dumps(results))
            (folder / "clients.csv").write_text(
                "client,seen,num_test,accuracy,accuracy_global\n"
                f"a,true,2,{accuracy},0\nb,true,2,0.5,0\nc,true,0,,\n"
            )
            runs[seed] = folder
        return Outcome(row, [], row.candidates[1], runs)

    def rows(self, tmp_path: Path) -> Any:
        mean = self.outcome(tmp_path, "mean", ["0.5", "0.7"])
        other = self.outcome(tmp_path, "other", ["0.4", "0.8"])
        return table_of([mean, other], "mean")

    def test_means_and_deviations(self, tmp_path: Path) -> None:
        mean, other = self.rows(tmp_path)
        # ((0.5 - 0.6)² + (0.7 - 0.6)²) / (2 - 1) = 0.02
        assert mean.seen.average.mean == pytest.approx(0.6)
        assert mean.seen.average.std == pytest.approx(0.02**0.5)
        assert mean.unseen.average.mean is None
        assert mean.seconds == pytest.approx(4.0)
        # Of a and b, a is worse with seed 1 (0.4 < 0.5) and not with seed 2.
        assert other.seen.fraction_degraded.mean == pytest.approx(0.25)
        assert mean.seen.fraction_degraded.mean == 0

    def test_it_is_written_in_percent(self, tmp_path: Path) -> None:
        rows = self.rows(tmp_path)
        header, first, second = as_cells(rows, "mean")
        assert header[3] == "degraded vs FedAvg"
        assert first[:4] == ["FedAvg", "60.0 ± 14.1", "25.0 ± 0.0", "0.0 ± 0.0"]
        assert second[3:5] == ["25.0 ± 35.4", "-"]
        assert len(header) == len(first)

    def test_the_csv_has_every_figure(self, tmp_path: Path) -> None:
        first, second = csv.DictReader(io.StringIO(as_csv(self.rows(tmp_path))))
        assert first["row"] == "mean"
        assert float(second["seen_fraction_degraded"]) == pytest.approx(0.25)
        assert second["unseen_average"] == ""
        # 12.706 = t of 97.5 % with 1 degree of freedom: t · √0.02 / √2.
        half_width = float(first["seen_average_half_width"])
        assert half_width == pytest.approx(12.706 * 0.1, abs=1e-3)
        assert json.loads(first["chosen"]) == {"training.learning_rate": 0.1}

    def test_it_is_told_what_is_behind_the_sign(self, tmp_path: Path) -> None:
        rows, comparison = self.rows(tmp_path), plan(tmp_path)
        told = "In the comparison's table ± is the standard deviation over 2 seeds; "
        shown = write_comparison(comparison, [], rows, tmp_path)
        assert shown.remarks[0].startswith(told)
        *_, empty, last = (tmp_path / "table.md").read_text().splitlines()
        assert (empty, last) == ("", shown.remarks[0])

    def test_without_deviations_there_is_nothing_to_tell(self, tmp_path: Path) -> None:
        rows = table_of([self.outcome(tmp_path, "mean", ["0.5"])], "mean")
        shown = write_comparison(plan(tmp_path, seeds=[1]), [], rows, tmp_path)
        assert shown.remarks == ()
        assert "±" not in (tmp_path / "table.md").read_text()

    @pytest.mark.parametrize("content", [None, "client,seen\na,true\n"])
    def test_what_to_delete_where_clients_are_lost(
        self, tmp_path: Path, content: str | None
    ) -> None:
        mean = self.outcome(tmp_path, "mean", ["0.5", "0.7"])
        file = mean.runs[2] / "clients.csv"
        file.unlink()
        if content is not None:
            file.write_text(content)
        message = f"clients.csv is missing or damaged, .* Delete {mean.runs[2]}, and"
        with pytest.raises(RunError, match=message):
            table_of([mean], "mean")
