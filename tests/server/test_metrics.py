"""Metrics against scikit-learn's and by hand, and their figures over clients."""

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment, results_identity
from knnper.metrics import (
    METRICS,
    Compute,
    auroc,
    balanced_accuracy,
    computations,
    macro_f1,
)
from knnper.server.distribution_log import DistributionLog
from knnper.server.plausibility import evaluation_problem, result_problem
from knnper.server.result_files import write_clients_csv
from knnper.server.results import metric_of, summarise
from knnper.settings import Choice, Settings
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.evaluation import ClientResult, Evaluation, score


def named(*names: str) -> dict[str, Compute]:
    return computations(Choice(name, Settings()) for name in names)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(0, 20))
def test_metrics_equal_those_of_scikit_learn(
    seed: int, num_classes: int, more: int
) -> None:
    rng = np.random.default_rng(seed)
    # Every class occurs, so that scikit-learn's means are over all of them, too.
    labels = rng.permutation([*range(num_classes), *rng.integers(0, num_classes, more)])
    drawn = rng.dirichlet(np.ones(num_classes), len(labels)).round(1) + 0.01
    probabilities = drawn / drawn.sum(axis=1, keepdims=True)
    predicted = probabilities.argmax(axis=1)
    assert balanced_accuracy(labels, probabilities) == pytest.approx(
        balanced_accuracy_score(labels, predicted)
    )
    assert macro_f1(labels, probabilities) == pytest.approx(
        f1_score(labels, predicted, average="macro")
    )
    scores = probabilities[:, 1] if num_classes == 2 else probabilities
    expected = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert auroc(labels, probabilities) == pytest.approx(expected)


def test_only_classes_of_the_client_count() -> None:
    labels = np.array([0, 0, 0, 2])
    probabilities = np.array(
        [[0.8, 0.1, 0.1], [0.5, 0.2, 0.3], [0.2, 0.6, 0.2], [0.6, 0.0, 0.4]]
    )
    # Predicted: 0, 0, 1, 0. Class 0: recall 2/3, precision 2/3; class 2: nothing.
    assert balanced_accuracy(labels, probabilities) == pytest.approx(1 / 3)
    assert macro_f1(labels, probabilities) == pytest.approx(1 / 3)
    # Class 0: 0.8 > 0.6, 0.5 < 0.6, 0.2 < 0.6. Class 2: 0.4 is above all others.
    assert auroc(labels, probabilities) == pytest.approx((1 / 3 + 1) / 2)


@pytest.mark.filterwarnings("error")
def test_metrics_that_are_undefined_or_not_finite() -> None:
    one_class = torch.zeros(3, dtype=torch.int64)
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [math.nan, 0.5]])
    figures = score(probabilities, one_class, metrics=named(*METRICS))
    # Probabilities that are not finite predict no class, rather than class 0.
    assert figures.metrics == {
        "balanced_accuracy": pytest.approx(1 / 3),
        "macro_f1": pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3)),
        "auroc": None,
    }
    nothing = score(torch.empty((0, 2)), one_class[:0], metrics=named(*METRICS))
    assert [metric_of(nothing, name) for name in METRICS] == [None] * len(METRICS)


def evaluation(label: int, *sure: float, auroc: float | None = None) -> Evaluation:
    """Return that of a model that gives class 0 so much, of examples of one class."""
    probabilities = torch.tensor(
        [[probability, 1 - probability] for probability in sure], dtype=torch.float64
    )
    labels = torch.full((len(sure),), label)
    figures = score(probabilities, labels, metrics=named("macro_f1"))
    return dataclasses.replace(figures, metrics={**figures.metrics, "auroc": auroc})


def client(name: str, personal: Evaluation, reference: Evaluation) -> ClientResult:
    return ClientResult(name, True, 5, 1, personal, reference, score(*NOBODY))


NOBODY = torch.empty((0, 2)), torch.empty(0, dtype=torch.int64)
RESULTS = [
    client("a", evaluation(0, 0.8, 0.8, auroc=0.7), evaluation(0, 0.5, 0.5, auroc=0.9)),
    client("b", evaluation(0, 0.2), evaluation(0, 0.4)),
    client("c", score(*NOBODY), score(*NOBODY)),
]


def test_figures_of_a_group_by_hand() -> None:
    group = summarise(RESULTS, ["accuracy", "auroc", "log_loss"])
    personal, reference = group.personal.metrics, group.reference.metrics
    a, b = -math.log(0.8), -math.log(0.2)
    expected = {
        "weighted": (2 * a + b) / 3,
        "mean": (a + b) / 2,
        "bottom_decile": b,  # of a loss the worst is the largest
        "worst": b,
        "std": (b - a) / 2,
        "fraction_degraded": 0.5,
        "num_undefined": 0,
    }
    for name, value in expected.items():
        assert personal[f"log_loss_{name}"] == pytest.approx(value), name
    assert personal["auroc_weighted"] == personal["auroc_worst"] == 0.7
    assert (personal["auroc_fraction_degraded"], personal["auroc_num_undefined"]) == (
        1.0,
        1,
    )
    assert reference["auroc_mean"] == 0.9
    assert reference["auroc_fraction_degraded"] == 0.0
    document = group.as_document()
    assert personal.items() <= document.items()
    assert reference.items() <= document["global"].items()
    assert "metrics" not in document
    assert not [name for name in document if name.startswith("accuracy_num")]
    nobody = summarise(RESULTS[2:], ["auroc"]).as_document()
    assert (nobody["auroc_weighted"], nobody["auroc_num_undefined"]) == (None, 0)


def test_columns_stand_before_what_was_chosen(tmp_path: Path) -> None:
    chosen = [dataclasses.replace(result, chosen={"a_weight": 1}) for result in RESULTS]
    write_clients_csv(tmp_path / "clients.csv", chosen, ["macro_f1", "log_loss", "ece"])
    with (tmp_path / "clients.csv").open() as file:
        first, second, third = csv.DictReader(file)
    assert list(first)[9:] == [
        *("macro_f1", "macro_f1_global", "ece", "ece_global", "a_weight")
    ]
    assert (first["macro_f1"], second["macro_f1"], third["macro_f1"]) == (
        "1.0",
        "0.0",
        "",
    )
    assert float(second["ece"]) == pytest.approx(0.8)


def test_a_file_of_reports_keeps_them(tmp_path: Path) -> None:
    log = DistributionLog(tmp_path / "lines")
    log.append("model", {result.client: result for result in RESULTS})
    assert log.reported("model") == {result.client: result for result in RESULTS}


@pytest.mark.parametrize(
    "figures",
    [
        {"accuracy_of_others": 0.5},
        {"auroc": 1.1},
        {"auroc": -0.1},
        {"auroc": math.nan},
        {"auroc": True},
        {"auroc": "0.5"},
    ],
)
def test_implausible_metrics_are_refused(figures: dict[str, Any]) -> None:
    metrics = ["auroc", "macro_f1"]
    assert result_problem(RESULTS[0], metrics) is None
    assert "not requested" in str(result_problem(RESULTS[0], ["auroc"]))
    wrong = dataclasses.replace(evaluation(0, 0.5), metrics=figures)
    assert evaluation_problem(wrong, metrics=metrics)


def test_an_experiment_names_them() -> None:
    def experiment(**run: Any) -> Experiment:
        document = {
            "name": "metrics",
            "data": {"name": "digits"},
            "partition": {"name": "iid", "num_clients": 2},
            "model": {"name": "tiny_cnn"},
            "method": {"name": "fedavg"},
            "run": run,
        }
        return load_experiment(document, experiment_catalogue())

    before = results_identity(experiment())
    assert results_identity(experiment(metrics=[])) == before
    assert results_identity(experiment(metrics=["auroc"])) != before
    with pytest.raises(ConfigError, match=r'run\.metrics.*"macro_f2".*macro_f1'):
        experiment(metrics=["auroc", "macro_f2"])
