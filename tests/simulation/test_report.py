import json
from pathlib import Path
from typing import Any

import pytest

from knnper.config.errors import RunError
from simulation.report import (
    Run,
    as_documents,
    as_markdown,
    comparison_table,
    load_run,
)

FIRST_LINE = "# All settings of the run in this folder; written by `knnper simulate`.\n"


def group(
    personal: float, reference: float, num_clients: int = 4
) -> dict[str, dict[str, Any] | Any]:
    def figures(accuracy: float, hurt: float) -> dict[str, Any]:
        return {
            "num_clients": num_clients,
            "accuracy_weighted": accuracy,
            "accuracy_bottom_decile": accuracy / 2,
            "fraction_hurt": hurt,
        }

    own = figures(personal, 0.0 if personal == reference else 0.25)
    return {**own, "global": figures(reference, 0.0)}


def run(method: str, personal: float, reference: float, name: str = "run") -> Run:
    nobody = {"num_clients": 0, "accuracy_weighted": None, "global": {"num_clients": 0}}
    training = {"num_rounds": 30, "seconds": 12.0, "personalization_seconds": 3.0}
    results = {"method": method, "seen": group(personal, reference), "unseen": nobody}
    return Run(name, {**results, "training": training, "manifest": {}})


def test_knn_per_is_shown_beside_the_fedavg_it_goes_on_from() -> None:
    seen_and_unseen = run("knn_per", 0.8, 0.6)
    results = {**seen_and_unseen.results, "unseen": group(0.7, 0.5, num_clients=1)}
    rows = comparison_table([Run("demo", results)])
    assert [(row.method, row.group, row.average) for row in rows] == [
        ("FedAvg", "seen", 0.6),
        ("kNN-Per", "seen", 0.8),
        ("FedAvg", "unseen", 0.5),
        ("kNN-Per", "unseen", 0.7),
    ]
    assert [row.seconds for row in rows[:2]] == [12.0, 15.0]
    assert (rows[1].bottom_decile, rows[1].fraction_hurt) == (0.4, 0.25)


def test_other_methods_have_a_global_model_of_their_own() -> None:
    rows = comparison_table([run("local", 0.8, 0.6), run("not_shipped", 0.5, 0.4)])
    assert [row.method for row in rows] == [
        "Local",
        "not_shipped (global)",
        "not_shipped",
    ]


def test_a_method_without_personalisation_has_one_row() -> None:
    rows = comparison_table([run("fedavg", 0.6, 0.6)])
    assert [(row.method, row.is_reference) for row in rows] == [("FedAvg", False)]


@pytest.mark.parametrize("order", [1, -1])
def test_the_same_global_model_is_shown_once(order: int) -> None:
    runs = [run("fedavg", 0.6, 0.6, "base"), run("knn_per", 0.8, 0.6, "knn")]
    rows = comparison_table(runs[::order])
    assert sorted((row.method, row.run) for row in rows) == [
        ("FedAvg", "base"),
        ("kNN-Per", "knn"),
    ]


def test_equal_runs_are_both_shown() -> None:
    rows = comparison_table([run("knn_per", 0.8, 0.6, name) for name in ("a", "b")])
    assert [(row.run, row.method) for row in rows] == [
        ("a", "FedAvg"),
        ("a", "kNN-Per"),
        ("b", "kNN-Per"),
    ]


def test_markdown() -> None:
    table = as_markdown(comparison_table([run("knn_per", 0.8, 0.6)]))
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "| method | group | average | bottom decile | share hurt | clients | rounds "
        "| seconds |",
        "| ------- | ----- | ------- | ------------- | ---------- | ------- | ------ "
        "| ------- |",
        "| FedAvg | seen | 60.0 % | 30.0 % | 0.0 % | 4 | 30 | 12.0 |",
        "| kNN-Per | seen | 80.0 % | 40.0 % | 25.0 % | 4 | 30 | 15.0 |",
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_several_runs_are_named() -> None:
    runs = [run("knn_per", 0.8, 0.6, "a"), run("local", 0.5, 0.1, "b")]
    lines = as_markdown(comparison_table(runs)).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["a", "a", "b"]


def test_documents_are_plain_values() -> None:
    documents = as_documents(comparison_table([run("fedavg", 0.6, 0.6)]))
    assert json.loads(json.dumps(documents)) == documents
    assert documents[0]["average"] == 0.6


def test_load(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        load_run(tmp_path)
    (tmp_path / "experiment.yaml").write_text(FIRST_LINE)
    with pytest.raises(RunError, match="the run is not done"):
        load_run(tmp_path)
    results = run("fedavg", 0.6, 0.6).results
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert load_run(tmp_path) == Run(tmp_path.name, results)
    del (incomplete := dict(results))["unseen"]
    (tmp_path / "results.json").write_text(json.dumps(incomplete))
    with pytest.raises(RunError, match=r"results\.json is damaged: unseen missing"):
        load_run(tmp_path)
