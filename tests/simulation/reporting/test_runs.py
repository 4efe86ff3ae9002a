import json
import math
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import RunError
from knnper.experiment_file import load_experiment, to_document
from knnper.server.results import summarise
from knnper.server.run_folder import EXPERIMENT, FIRST_LINE
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.reports.accuracy_table import (
    ModelRow,
    as_cells,
    table_of,
)
from knnper.simulation.reports.estimate import Estimate, estimate
from knnper.simulation.reports.finished_run import (
    FinishedRun,
    find_runs,
    load_run,
)
from knnper.simulation.reports.setups import departures, in_common, setups_of
from tests.simulation.reporting.made_runs import client_result, made_run


def group(personal: float, reference: float, num_clients: int = 4) -> dict[str, Any]:
    def figures(accuracy: float, hurt: float) -> dict[str, Any]:
        return {
            "num_clients": num_clients,
            "accuracy_weighted": accuracy,
            "accuracy_bottom_decile": accuracy / 2,
            "fraction_degraded": hurt,
        }

    shown = figures(personal, 0.0 if personal == reference else 0.25)
    return {**shown, "global": figures(reference, 0.0)}


def run(
    method: str, personal: float, reference: float, name: str = "run", seed: int = 0
) -> FinishedRun:
    nobody = {"num_clients": 0, "accuracy_weighted": None, "global": {"num_clients": 0}}
    training = {"num_rounds": 30, "seconds": 12.0, "personalization_seconds": 3.0}
    results = {
        "method": method,
        "seen": group(personal, reference),
        "unseen": nobody,
        "training": training,
        "manifest": {"experiment": {"method": {"name": method}, "run": {"seed": seed}}},
    }
    return FinishedRun(Path(name), results)


def table(*runs: FinishedRun) -> list[ModelRow]:
    return table_of(setups_of(runs))


def average(row: ModelRow) -> float | None:
    return row.figures["average"].mean


def test_knn_per_is_shown_beside_the_fedavg_it_goes_on_from() -> None:
    seen_and_unseen = run("knn_per", 0.8, 0.6)
    results = {**seen_and_unseen.results, "unseen": group(0.7, 0.5, num_clients=1)}
    rows = table_of(setups_of([FinishedRun(Path("demo"), results)]))
    assert [(row.label, row.group, average(row)) for row in rows] == [
        ("FedAvg", "seen", 0.6),
        ("kNN-Per", "seen", 0.8),
        ("FedAvg", "unseen", 0.5),
        ("kNN-Per", "unseen", 0.7),
    ]
    assert [row.seconds for row in rows[:2]] == [12.0, 15.0]
    assert rows[1].figures["bottom_decile"] == Estimate(0.4, None, None, 1)
    assert rows[1].figures["fraction_degraded"].mean == 0.25


def test_methods_with_another_global_model_or_none_of_its_own() -> None:
    rows = table(run("local", 0.8, 0.6), run("not_shipped", 0.5, 0.4))
    names = ["Local", "not_shipped (global)", "not_shipped"]
    assert [row.label for row in rows] == names
    rows = table_of(setups_of([run("fedavg", 0.6, 0.6)]))
    assert [(row.label, row.is_reference) for row in rows] == [("FedAvg", False)]


@pytest.mark.parametrize("order", [1, -1])
def test_the_same_global_model_is_shown_once(order: int) -> None:
    runs = [run("fedavg", 0.6, 0.6, "base"), run("knn_per", 0.8, 0.6, "knn")]
    rows = table(*runs[::order])
    assert sorted((row.label, row.runs) for row in rows) == [
        ("FedAvg", ("base",)),
        ("kNN-Per", ("knn",)),
    ]


def test_seeds_are_one_row_with_their_interval() -> None:
    rows = table(run("knn_per", 0.8, 0.6, "a"), run("knn_per", 0.7, 0.6, "b", seed=1))
    both = ("a", "b")
    assert [(row.label, row.runs) for row in rows] == [
        ("FedAvg", both),
        ("kNN-Per", both),
    ]
    # s = 0.1 / √2, t = 12.706: t · s / √2 = 0.6353.
    assert rows[1].figures["average"].half_width == pytest.approx(0.63531, abs=1e-5)
    # Each run's gain is its own: 0.2 and 0.1.
    assert rows[1].figures["gain"].mean == pytest.approx(0.15)
    assert rows[0].figures["gain"].mean is None
    header, *cells = as_cells(rows)
    percents = ["75.0 ± 63.5 %*", "37.5 ± 31.8 %*", "25.0 ± 0.0 %*"]
    assert cells[1] == ["kNN-Per", "seen", *percents, "4", "2", "30", "15.0"]
    assert header[6] == "seeds"


def with_state(
    made: FinishedRun, state: str, unseen: dict[str, Any] | None = None
) -> FinishedRun:
    """Return the run with the fingerprint of a state, and with unseen clients."""
    training = {**made.results["training"], "state_sha256": state}
    groups = {"unseen": unseen} if unseen else {}
    return FinishedRun(made.path, {**made.results, "training": training, **groups})


def test_a_global_model_has_one_name_in_all_groups() -> None:
    """Figures that happen to be equal in one group do not merge two models."""
    unseen = group(0.7, 0.5, num_clients=1)
    rows = table(
        with_state(run("knn_per", 0.8, 0.6, "a"), "1", unseen),
        with_state(run("knn_per", 0.8, 0.5, "b"), "2", unseen),
    )
    names = [f"FedAvg of kNN-Per ({name})" for name in "ab"]
    for which in ("seen", "unseen"):
        references = [row for row in rows if row.group == which and row.is_reference]
        assert [row.label for row in references] == names
        assert [row.runs for row in references] == [("a",), ("b",)]


def test_models_of_other_states_are_not_the_same() -> None:
    runs = [run("knn_per", 0.8, 0.6, "a"), run("fedavg_plus", 0.7, 0.6, "b")]
    same = table(*(with_state(finished, "1") for finished in runs))
    assert [row.label for row in same] == ["FedAvg", "kNN-Per", "FedAvg+"]
    other = table(*(with_state(finished, finished.name) for finished in runs))
    assert [row.label for row in other if row.is_reference] == [
        "FedAvg of kNN-Per",
        "FedAvg of FedAvg+",
    ]


@pytest.mark.parametrize("method", ["local", "fedper", "fedrep", "fedbn", "lg_fedavg"])
def test_nothing_is_gained_over_a_model_that_means_nothing(method: str) -> None:
    rows = table(run(method, 0.8, 0.1), run("ditto", 0.8, 0.6))
    figures = rows[0].figures
    assert (figures["gain"].mean, figures["fraction_degraded"].mean) == (None, None)
    assert as_cells(rows)[1][4] == "-"
    assert rows[-1].figures["gain"].mean == pytest.approx(0.2)
    assert rows[-1].figures["fraction_degraded"].mean == 0.25


def test_figures_are_means_over_the_seeds(tmp_path: Path) -> None:
    clients = {
        seed: [client_result(number, seed) for number in range(12)]
        for seed in (0, 1, 2)
    }
    runs = [
        load_run(made_run(tmp_path / str(seed), results, seed=seed))
        for seed, results in clients.items()
    ]
    rows = {(row.label, row.group): row for row in table(*runs)}
    groups = [
        summarise([result for result in results if not result.seen])
        for results in clients.values()
    ]
    for label, summaries in (
        ("kNN-Per", [summary.personal for summary in groups]),
        ("FedAvg", [summary.reference for summary in groups]),
    ):
        figures = rows[label, "unseen"].figures
        assert figures["worst"] == estimate(
            summary.accuracy_worst for summary in summaries
        )
        assert figures["ece"] == estimate(summary.ece for summary in summaries)
        assert figures["log_loss"] == estimate(
            summary.log_loss for summary in summaries
        )
        assert figures["mean"] == estimate(
            summary.accuracy_mean for summary in summaries
        )


def labels(*paths: Path) -> list[str]:
    return [setup.label for setup in setups_of(map(load_run, paths))]


def test_runs_that_differ_in_the_seed_alone_are_one(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (7, 2)]
    (setup,) = setups_of(map(load_run, paths))
    assert [run.seed for run in setup.runs] == [2, 7]
    assert setup.label == "kNN-Per"
    # The same seed again is no further seed.
    paths = [made_run(tmp_path / name, seed=0) for name in ("first", "second")]
    assert labels(*paths) == ["kNN-Per (first)", "kNN-Per (second)"]


def test_settings_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    document = {
        "name": "old",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "knn_per"},
    }
    whole = to_document(load_experiment(document, experiment_catalogue()))
    paths = []
    for seed, experiment in enumerate((document, whole)):
        paths.append(made_run(tmp_path / str(seed), seed=seed))
        results = json.loads((paths[-1] / "results.json").read_text())
        results["manifest"]["experiment"] = {**experiment, "run": {"seed": seed}}
        (paths[-1] / "results.json").write_text(json.dumps(results))
    assert labels(*paths) == ["kNN-Per"]


def test_a_run_named_twice_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made_run(tmp_path / "runs" / "a")
    made_run(tmp_path / "runs" / "b", seed=1)
    monkeypatch.chdir(tmp_path)
    for again in (path, Path("runs/a"), Path("runs/../runs/a")):
        assert [run.path for run in find_runs([path, again])[0]] == [path]
    named = find_runs([path, tmp_path / "runs", Path("runs")])[0]
    assert sorted(run.name for run in named) == ["a", "b"]
    assert [setup.label for setup in setups_of(named)] == ["kNN-Per"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            [{"rate": 0.1}, {"rate": 0.01}, {"rate": 0.01, "method": "fedavg"}],
            ["kNN-Per, rate 0.1", "kNN-Per, rate 0.01", "FedAvg"],
        ),
        (  # keys that end alike are told whole
            [{"rate": 1, "head": {"rate": 2}}, {"rate": 2, "head": {"rate": 1}}],
            [
                "kNN-Per, training.rate 1, training.head.rate 2",
                "kNN-Per, training.rate 2, training.head.rate 1",
            ],
        ),
        (  # where much departs runs are named
            [dict.fromkeys("abcd", value) for value in (1, 2)],
            ["kNN-Per (0)", "kNN-Per (1)"],
        ),
    ],
)
def test_a_label_tells_what_departs(
    tmp_path: Path, settings: list[dict[str, Any]], expected: list[str]
) -> None:
    paths = [
        made_run(tmp_path / str(n), **changes) for n, changes in enumerate(settings)
    ]
    assert labels(*paths) == expected


def test_runs_of_one_name_are_told_apart_by_their_place(tmp_path: Path) -> None:
    places = [tmp_path / "x", tmp_path / "more" / "x"]
    paths = [made_run(place, a=n, b=n, c=n, d=n) for n, place in enumerate(places)]
    assert labels(*paths) == [f"kNN-Per ({path})" for path in paths]


def test_departures_are_among_the_setups_that_have_the_key(tmp_path: Path) -> None:
    runs = [
        load_run(made_run(tmp_path / "a", momentum=0.9, batch_size=8)),
        load_run(made_run(tmp_path / "b", momentum=0.5, batch_size=8, only=1)),
        load_run(made_run(tmp_path / "c", batch_size=8)),
    ]
    assert departures(runs) == (["training.momentum"], [["0.9"], ["0.5"], ["-"]])
    common = in_common(runs)
    assert common["training.batch_size"] == "8"
    assert "training.only" not in common
    assert "training.momentum" not in common


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


def test_a_folder_of_runs_has_the_best_kind_first(tmp_path: Path) -> None:
    bad = [client_result(1, num_test=8)] * 2
    good = [client_result(number, num_test=1) for number in range(1, 40)]
    right = [client for client in good if client.personal.num_correct == 1]
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
    tuned = made_run(tmp_path / "runs" / "tuned", evaluate_on="validation")
    runs, remarks = find_runs([tmp_path])
    assert [run.name for run in runs] == ["tested"]
    assert "that chose settings on validation data, left out: 1." in remarks[0]
    # Named itself, or alone in its folder, it is shown.
    assert len(find_runs([tuned])[0]) == 1
    tuned.rename(tmp_path / "elsewhere")
    assert len(find_runs([tmp_path / "elsewhere"])[0]) == 1
    # A folder in which no run is done.
    (tmp_path / "other" / "a").mkdir(parents=True)
    (tmp_path / "other" / "a" / EXPERIMENT).write_text(FIRST_LINE)
    with pytest.raises(RunError, match=r"none of the 1 runs in .* is done"):
        find_runs([tmp_path / "other"])


def test_estimates_by_hand() -> None:
    # s = 0.1, and Student's table has 4.3027 for 2 degrees of freedom.
    estimated = estimate([0.8, 0.9, 0.7])
    assert (estimated.mean, estimated.std, estimated.count) == pytest.approx(
        (0.8, 0.1, 3)
    )
    assert estimated.half_width == pytest.approx(
        4.302653 * 0.1 / math.sqrt(3), rel=1e-6
    )
    # s = √2, s / √2 = 1, and Student's table has 12.706 for 1 degree of freedom.
    assert estimate([1.0, 3.0]).half_width == pytest.approx(12.7062, rel=1e-5)
    # One value has no interval.
    assert estimate([None, 0.5]) == Estimate(0.5, None, None, 1)
    assert estimate([None]) == Estimate(None, None, None, 0)
