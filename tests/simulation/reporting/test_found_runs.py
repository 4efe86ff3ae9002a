import json
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.server.run_folder import EXPERIMENT, FIRST_LINE
from knnper.simulation.reports.runs import find_runs, load_run
from tests.simulation.reporting.made_runs import client_result, made_run


def test_a_run_that_is_none_not_done_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        load_run(tmp_path)
    (tmp_path / EXPERIMENT).write_text(FIRST_LINE)
    with pytest.raises(RunError, match="the run is not done"):
        load_run(tmp_path)
    results = json.loads(
        (made_run(tmp_path / "run") / "results.json").read_text(encoding="utf-8")
    )
    del results["unseen"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(RunError, match=r"results\.json is damaged: unseen missing"):
        load_run(tmp_path)


def test_settings_are_all_but_the_name_and_the_run(tmp_path: Path) -> None:
    run = load_run(made_run(tmp_path / "a", seed=4, schedule={"name": "constant"}))
    assert run.settings == {
        "partition.name": "iid",
        "partition.evaluate_on": "test",
        "training.schedule.name": "constant",
        "method.name": "knn_per",
        "personalization.name": "knn",
    }
    assert (run.name, run.seed, run.title) == ("a", 4, "kNN-Per")
    assert run.reference_title == "FedAvg"


def test_a_folder_of_runs_has_the_best_kind_first(tmp_path: Path) -> None:
    bad = [client_result(1, num_test=8)] * 2
    good = [client_result(number, num_test=1) for number in range(1, 40)]
    right = [one for one in good if one.personal.num_correct == 1]
    made_run(tmp_path / "runs" / "a", bad, seed=0, learning_rate=1.0)
    made_run(tmp_path / "runs" / "b", right, seed=0, learning_rate=0.1)
    made_run(tmp_path / "runs" / "c", bad, seed=1, learning_rate=0.1)
    (tmp_path / "runs" / "d").mkdir()
    (tmp_path / "runs" / "d" / EXPERIMENT).write_text(FIRST_LINE)
    for path in (tmp_path, tmp_path / "runs"):
        runs, remarks = find_runs([path])
        assert [run.name for run in runs] == ["b", "c", "a"]
        assert remarks == [f"Runs in {path} without results, left out: 1."]


def test_runs_that_tuned_are_left_out_of_a_comparison(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "tested")
    tuned = made_run(tmp_path / "runs" / "tuned")
    text = (tuned / "results.json").read_text()
    (tuned / "results.json").write_text(
        text.replace('"evaluate_on": "test"', '"evaluate_on": "validation"')
    )
    runs, remarks = find_runs([tmp_path])
    assert [run.name for run in runs] == ["tested"]
    assert "that chose settings on validation data, left out: 1." in remarks[0]
    # Named itself, or alone in its folder, it is shown.
    assert len(find_runs([tuned])[0]) == 1
    tuned.rename(tmp_path / "elsewhere")
    assert len(find_runs([tmp_path / "elsewhere"])[0]) == 1


def test_a_folder_in_which_no_run_is_done(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / EXPERIMENT).write_text(FIRST_LINE)
    with pytest.raises(RunError, match=r"none of the 1 runs in .* is done"):
        find_runs([tmp_path])
