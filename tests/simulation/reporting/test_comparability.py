"""What a report says against itself: above the table, in plain sentences."""

import json
from pathlib import Path

import pytest

from knnper.simulation.batches.folder import CODE
from knnper.simulation.reports.report import (
    Report,
    as_html,
    as_markdown_report,
    report_of,
)
from tests.simulation.reporting.made_runs import made_run
from tests.simulation.reporting.parsed_page import Page


def remarks(*paths: Path) -> tuple[str, ...]:
    (part,) = report_of(paths).chapters
    return part.remarks


def remarks_with_charts(*paths: Path) -> tuple[str, ...]:
    (chapter,) = report_of(paths).chapters
    return (*chapter.remarks, *chapter.remarks_on_charts)


def test_other_seeds(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "a", seed=0),
        made_run(tmp_path / "b", seed=1),
        made_run(tmp_path / "c", method="local"),
    ]
    (remark,) = remarks(*paths)
    assert remark.startswith("Not all setups have the same seeds")


def test_runs_of_other_splits_are_told(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / name, method=name) for name in ("local", "fedavg")]
    results = paths[0] / "results.json"
    results.write_text(results.read_text().replace("split of", "another split of"))
    (remark,) = remarks(*paths)
    assert remark.startswith("Runs with the same seed have different splits")


def test_clients_without_figures_are_told(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run")
    document = json.loads((path / "results.json").read_text())
    document["hand_over"] = {"withheld": ["a", "b"], "away": ["c"]}
    (path / "results.json").write_text(json.dumps(document))
    (remark,) = remarks(path)
    assert remark.startswith("run: 2 clients keep their figures to themselves, 1 did")


def test_runs_on_validation_data_are_told(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / str(seed), seed=seed, evaluate_on="validation")
        for seed in (0, 1)
    ]
    (remark,) = remarks(*paths)
    assert remark.startswith("These runs were evaluated on validation data")
    report = report_of(paths)
    texts = [as_markdown_report(report), Page(as_html(report)).text]
    texts += told(report)
    assert "Accuracies on the clients' validation splits" in texts[0]
    assert "Accuracies on the clients' validation splits" in texts[1]
    assert any("average validation accuracy (%)" in text for text in texts)
    # Nothing else here is of test data: the one remark says so.
    assert not any("test" in text.replace(remark, "").lower() for text in texts[2:])


def test_test_and_validation_data_are_kept_apart(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / "test")]
    paths.append(made_run(tmp_path / "validation", evaluate_on="validation"))
    report = report_of(paths)
    of_test, of_validation = report.chapters
    assert of_test.remarks == ()
    assert len(of_validation.remarks) == 1
    text = as_markdown_report(report)
    for split in ("test", "validation"):
        assert f"clients' {split} splits" in text


def told(report: Report) -> list[str]:
    """Return what the charts say, with how to read them."""
    pictures = [one.picture for one in report.sections if one.picture]
    axes = [axes for picture in pictures for axes in picture.figure.axes]
    return [
        *(picture.alternative for picture in pictures),
        *(section.text for section in report.sections if section.picture),
        *(one.get_xlabel() for one in axes),
        *(one.get_ylabel() for one in axes),
    ]


def test_runs_of_other_code_are_told(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in range(4)]
    for path, version in zip(paths, ("old", "new", "new", ""), strict=True):
        (path / CODE).write_text(version)
    (remark,) = remarks(*paths)
    assert "not made by the same code: code.txt has 2 versions in 3 runs" in remark
    assert remarks(*paths[1:]) == ()


@pytest.mark.parametrize(
    "name", ["clients.csv", "rounds.jsonl", "personalization.jsonl"]
)
def test_a_seed_that_lacks_a_file_is_told(tmp_path: Path, name: str) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    (paths[1] / name).unlink()
    (remark,) = remarks_with_charts(*paths)
    assert remark == (
        f"1 of the 2 runs of kNN-Per lack {name} ({paths[1]}): the charts of that file "
        "are of the others."
    )
    # What none has is told in the place of its chart; the table needs no such file.
    (paths[0] / name).unlink()
    assert remarks_with_charts(*paths) == ()
    assert remarks(*paths) == ()


def test_a_setup_that_lacks_a_file_is_told(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / "a"), made_run(tmp_path / "b", method="fedavg")]
    (paths[1] / "clients.csv").unlink()
    (remark,) = remarks_with_charts(*paths)
    assert remark == "FedAvg has no clients.csv: the charts of that file leave it out."


def test_a_run_without_rounds_lacks_none(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / "a"), made_run(tmp_path / "b", method="x", losses=())]
    assert remarks_with_charts(*paths) == ()
