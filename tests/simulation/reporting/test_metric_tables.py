"""Tables of another metric than the accuracy: reports, sweeps, comparisons."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.errors import ConfigError
from knnper.simulation.batches.choice import best_points
from knnper.simulation.batches.figure_names import (
    all_columns,
    is_percent,
    label_of,
)
from knnper.simulation.batches.runner import Outcome, run_batch
from knnper.simulation.batches.tables import (
    PointRow,
    documents_of,
    rows_of,
    table_of,
)
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.finished_run import load_run
from knnper.simulation.reports.pages import as_html, as_markdown_report
from knnper.simulation.reports.report import report_of
from tests.simulation.batches.small_comparison import ROWS, plan
from tests.simulation.batches.small_sweep import (
    BASE,
    NEIGHBORS,
    WORKERS,
    ignore,
    in_this_process,
    read,
)
from tests.simulation.reporting.made_runs import made_run

METRICS = ("macro_f1", "log_loss")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return a run of FedAvg and one of kNN-Per, over the same clients."""
    return [
        made_run(tmp_path / name, method=name, metrics=METRICS)
        for name in ("fedavg", "knn_per")
    ]


def seen(run: Path) -> list[dict[str, str]]:
    with (run / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["seen"] == "true" and row["accuracy"]]


def share(pairs: Sequence[tuple[float, float]]) -> float:
    return fmean(first > second for first, second in pairs)


def test_a_table_of_a_loss_by_hand(runs: list[Path]) -> None:
    (chapter,) = report_of(runs).chapters
    assert list(chapter.tables) == ["accuracy", *METRICS]
    for row in chapter.tables["log_loss"]:
        if row.group != "seen" or row.is_reference:
            continue
        clients = seen(runs[row.setup == "kNN-Per"])
        personal, reference, sizes = (
            [float(client[name]) for client in clients]
            for name in ("log_loss", "log_loss_global", "num_test")
        )
        total = sum(sizes)
        means = [
            sum(map(float.__mul__, values, sizes)) / total
            for values in (personal, reference)
        ]
        figures = {name: value.mean for name, value in row.figures.items()}
        assert figures["average"] == pytest.approx(means[0])
        assert figures["gain"] == pytest.approx(means[1] - means[0])
        # Of 7 to 9 clients the bottom decile is the worst: the largest loss.
        assert figures["bottom_decile"] == figures["worst"] == max(personal)
        degraded = share(list(zip(personal, reference, strict=True)))
        assert figures["fraction_degraded"] == pytest.approx(degraded)
        assert row.text("average") == f"{means[0]:.3f}"
        assert row.text("fraction_degraded") == f"{100 * degraded:.1f}"


def test_degraded_against_fedavg_by_hand(runs: list[Path]) -> None:
    fedavg, personal = (
        {one["client"]: float(one["macro_f1"]) for one in seen(run)} for run in runs
    )
    expected = share([(fedavg[name], personal[name]) for name in personal])
    (chapter,) = report_of(runs).chapters
    (row,) = (
        one
        for one in chapter.tables["macro_f1"]
        if (one.setup, one.group, one.is_reference) == ("kNN-Per", "seen", False)
    )
    assert row.figures["fraction_degraded_vs_fedavg"].mean == pytest.approx(expected)
    # The made clients of both runs are the same, but for what a method chose.
    assert load_run(runs[0]).figures("all")["macro_f1_mean"] == pytest.approx(
        load_run(runs[1]).figures("all")["macro_f1_mean"]
    )


@pytest.mark.integration
def test_pages_have_a_table_of_each(runs: list[Path]) -> None:
    report = report_of(runs)
    html, text = as_html(report), as_markdown_report(report)
    for title in ("Seen clients", "Seen clients: macro-F1", "Unseen clients: log-loss"):
        assert f"<caption>{title}</caption>" in html
        assert f"\n## {title}\n" in text
    assert "| average | gain | bottom decile |" in text


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.mark.integration
def test_the_command_shows_one(runs: list[Path]) -> None:
    rows = json.loads(invoke(*runs, "--json", "--metric", "macro_f1").stdout)
    assert {row["metric"] for row in rows} == {"macro_f1"}
    assert "average log-loss" in invoke(*runs, "--metric", "log_loss").stdout
    result = invoke(*runs, "--metric", "auroc")
    assert result.exit_code == 2
    assert "accuracy, macro_f1, log_loss" in " ".join(result.output.split())


NAMED = {**BASE, "run": {"metrics": ["macro_f1", "ece"]}}


def test_a_sweep_shows_and_chooses_by_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'macro_f1_mean'.*named in run\.metrics"):
        read(tmp_path, y="macro_f1_mean")
    sweep = read(tmp_path, base=NAMED, y="ece_mean")
    columns = all_columns(sweep.figures)
    assert "unseen.global.macro_f1_bottom_decile" in columns

    def row(neighbors: int, error: float) -> PointRow:
        estimates = {column: estimate([0.5, 0.5]) for column in columns}
        estimates["seen.ece_mean"] = estimate([error, error])
        return PointRow("alone", "alone", {NEIGHBORS: neighbors}, 2, 0, estimates)

    rows = [row(1, 0.25), row(5, 0.125)]
    assert best_points(sweep, rows) == [rows[1]]
    header, first = table_of(sweep, rows).header, table_of(sweep, rows).rows[0]
    assert header[1] == "calibration error, mean over clients"
    assert header[-2] == "calibration error, degraded vs global"
    assert (first[1], first[-2]) == ("25.0", "50.0")
    assert label_of("global.macro_f1_worst") == "global model's macro-F1, worst client"
    assert [
        is_percent(f"log_loss_{figure}") for figure in ("std", "fraction_degraded")
    ] == [*(False, True)]


@pytest.mark.integration
def test_a_comparison_tunes_and_shows_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORKERS, in_this_process)
    with pytest.raises(ConfigError, match=r"metric: found 'log_loss'.*run\.metrics"):
        plan(tmp_path, metric="log_loss")
    base = {**plan_base(), "run": {"metrics": ["log_loss"]}}
    rows = {"mean": ROWS["mean"]}
    comparison = plan(tmp_path, metric="log_loss", base=base, rows=rows, seeds=[1])
    outcomes: list[Outcome] = run_batch(comparison, tmp_path / "runs", 1, ignore)
    slow, fast = outcomes[0].candidates
    assert slow.score is not None
    assert fast.score is not None
    # The smaller loss is the better one.
    assert fast.score < slow.score
    assert outcomes[0].point is fast.point
    compared = rows_of(comparison, outcomes)
    table = table_of(comparison, compared)
    assert table.header[:2] == ("method", "seen log-loss")
    (document,) = documents_of(comparison, outcomes, compared)
    average = document["seen"]["average"]["mean"]
    assert table.rows[0][1] == f"{average:.4g}"
    assert document["seen"]["fraction_degraded"]["mean"] == 0.0


def plan_base() -> dict[str, Any]:
    return {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "tiny_cnn", "embedding_dim": 4},
        "training": {"num_rounds": 2, "batch_size": 16},
    }
