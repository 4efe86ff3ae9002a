import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from knnper.server.results import summarise
from knnper.simulation.reports.runs import (
    Estimate,
    FederatedData,
    Row,
    Run,
    as_cells,
    as_csv,
    as_documents,
    estimate,
    load_run,
    setups_of,
    table_of,
    table_of_run,
)
from tests.simulation.reporting.made_runs import client_result, made_run


def group(personal: float, reference: float, num_clients: int = 4) -> dict[str, Any]:
    def figures(accuracy: float, hurt: float) -> dict[str, Any]:
        return {
            "num_clients": num_clients,
            "accuracy_weighted": accuracy,
            "accuracy_bottom_decile": accuracy / 2,
            "fraction_degraded": hurt,
        }

    own = figures(personal, 0.0 if personal == reference else 0.25)
    return {**own, "global": figures(reference, 0.0)}


def run(
    method: str, personal: float, reference: float, name: str = "run", seed: int = 0
) -> Run:
    nobody = {"num_clients": 0, "accuracy_weighted": None, "global": {"num_clients": 0}}
    training = {"num_rounds": 30, "seconds": 12.0, "personalization_seconds": 3.0}
    results = {
        "method": method,
        "seen": group(personal, reference),
        "unseen": nobody,
        "training": training,
        "manifest": {"experiment": {"method": {"name": method}, "run": {"seed": seed}}},
    }
    return Run(Path(name), results)


def table(*runs: Run) -> list[Row]:
    return table_of(setups_of(runs))


def average(row: Row) -> float | None:
    return row.figures["average"].mean


def test_knn_per_is_shown_beside_the_fedavg_it_goes_on_from() -> None:
    seen_and_unseen = run("knn_per", 0.8, 0.6)
    results = {**seen_and_unseen.results, "unseen": group(0.7, 0.5, num_clients=1)}
    rows = table_of_run(Run(Path("demo"), results))
    assert [(row.label, row.group, average(row)) for row in rows] == [
        ("FedAvg", "seen", 0.6),
        ("kNN-Per", "seen", 0.8),
        ("FedAvg", "unseen", 0.5),
        ("kNN-Per", "unseen", 0.7),
    ]
    assert [row.seconds for row in rows[:2]] == [12.0, 15.0]
    assert rows[1].figures["bottom_decile"] == Estimate(0.4, None, None, 1)
    assert rows[1].figures["fraction_degraded"].mean == 0.25


def test_other_methods_have_a_global_model_of_their_own() -> None:
    rows = table(run("local", 0.8, 0.6), run("not_shipped", 0.5, 0.4))
    assert [row.label for row in rows] == [
        "Local",
        "not_shipped (global)",
        "not_shipped",
    ]


def test_a_method_without_personalisation_has_one_row() -> None:
    rows = table_of_run(run("fedavg", 0.6, 0.6))
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
    assert [(row.label, row.runs) for row in rows] == [
        ("FedAvg", ("a", "b")),
        ("kNN-Per", ("a", "b")),
    ]
    # s = 0.1 / √2, t = 12.706: t · s / √2 = 0.6353.
    assert rows[1].figures["average"].half_width == pytest.approx(0.63531, abs=1e-5)
    # Each run's gain is its own: 0.2 and 0.1.
    assert rows[1].figures["gain"].mean == pytest.approx(0.15)
    assert rows[0].figures["gain"].mean is None
    header, *cells = as_cells(rows)
    assert cells[1] == [
        "kNN-Per",
        "seen",
        "75.0 ± 63.5 %",
        "37.5 ± 31.8 %",
        "25.0 ± 0.0 %",
        "4",
        "2",
        "30",
        "15.0",
    ]
    assert header[6] == "seeds"


def test_global_models_of_one_name_say_whose_they_are() -> None:
    rows = table(run("knn_per", 0.8, 0.6, "a"), run("knn_per", 0.8, 0.5, "b"))
    assert [row.label for row in rows] == [
        "FedAvg of kNN-Per (a)",
        "kNN-Per (a)",
        "FedAvg of kNN-Per (b)",
        "kNN-Per (b)",
    ]


def with_state(made: Run, state: str, unseen: dict[str, Any] | None = None) -> Run:
    """Return the run with the fingerprint of a state, and with unseen clients."""
    training = {**made.results["training"], "state_sha256": state}
    groups = {"unseen": unseen} if unseen else {}
    return Run(made.path, {**made.results, "training": training, **groups})


def test_a_global_model_has_one_name_in_all_groups() -> None:
    """Figures that happen to be equal in one group do not merge two models."""
    unseen = group(0.7, 0.5, num_clients=1)
    rows = table(
        with_state(run("knn_per", 0.8, 0.6, "a"), "1", unseen),
        with_state(run("knn_per", 0.8, 0.5, "b"), "2", unseen),
    )
    names = [f"FedAvg of kNN-Per ({name})" for name in "ab"]
    for which in ("seen", "unseen"):
        found = [row for row in rows if row.group == which and row.is_reference]
        assert [row.label for row in found] == names
        assert [row.runs for row in found] == [("a",), ("b",)]


def test_models_of_other_states_are_not_the_same() -> None:
    runs = [run("knn_per", 0.8, 0.6, "a"), run("fedavg_plus", 0.7, 0.6, "b")]
    same = table(*(with_state(one, "1") for one in runs))
    assert [row.label for row in same] == ["FedAvg", "kNN-Per", "FedAvg+"]
    other = table(*(with_state(one, one.name) for one in runs))
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


def test_cells() -> None:
    header, *rows = as_cells(table_of_run(run("knn_per", 0.8, 0.6)))
    assert header[:5] == [
        "method",
        "group",
        "average",
        "bottom decile",
        "degraded vs global",
    ]
    assert header[5:] == ["clients", "rounds", "seconds"]
    assert rows == [
        ["FedAvg", "seen", "60.0 %", "30.0 %", "0.0 %", "4", "30", "12.0"],
        ["kNN-Per", "seen", "80.0 %", "40.0 %", "25.0 %", "4", "30", "15.0"],
    ]


def test_documents_are_plain_values_and_a_csv_has_a_column_each() -> None:
    rows = table_of_run(run("fedavg", 0.6, 0.6))
    documents = as_documents(rows, FederatedData("Digits", "IID (4 seen clients)"))
    assert documents[0]["data"] == "Digits"
    assert json.loads(json.dumps(documents)) == documents
    assert (documents[0]["average"], documents[0]["average_half_width"]) == (0.6, None)
    (read,) = csv.DictReader(io.StringIO(as_csv(documents)))
    assert read.keys() == documents[0].keys()
    assert (read["average"], read["average_std"], read["runs"]) == ("0.6", "", "run")


def test_all_figures_are_means_over_the_seeds_of_what_the_clients_had(
    tmp_path: Path,
) -> None:
    clients = {
        seed: [client_result(number, seed) for number in range(12)]
        for seed in (0, 1, 2)
    }
    runs = [
        load_run(made_run(tmp_path / str(seed), found, seed=seed))
        for seed, found in clients.items()
    ]
    rows = {(row.label, row.group): row for row in table(*runs)}
    groups = [
        summarise([one for one in found if not one.seen]) for found in clients.values()
    ]
    for label, summaries in (
        ("kNN-Per", [one.personal for one in groups]),
        ("FedAvg", [one.reference for one in groups]),
    ):
        figures = rows[label, "unseen"].figures
        assert figures["worst"] == estimate(one.accuracy_worst for one in summaries)
        assert figures["ece"] == estimate(one.ece for one in summaries)
        assert figures["log_loss"] == estimate(one.log_loss for one in summaries)
        assert figures["mean"] == estimate(one.accuracy_mean for one in summaries)
