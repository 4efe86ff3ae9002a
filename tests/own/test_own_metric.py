"""Metrics that users bring, from the experiment's file to the tables."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import matthews_corrcoef

from knnper.errors import ConfigError, OwnCodeError
from knnper.experiment import Experiment
from knnper.experiment_file import (
    load_experiment,
    read_experiment,
    results_identity,
    to_yaml,
)
from knnper.metrics import computations
from knnper.server.observer import Observer
from knnper.server.plausibility import evaluation_problem
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.reports.pages import as_markdown_report
from knnper.simulation.reports.report import report_of
from knnper.simulation.workbench import open_workbench
from knnper.strategies.core.evaluation import Evaluation

parquet: Any = pytest.importorskip("pyarrow.parquet")

SCORES = """
import numpy as np

def hits(labels, probabilities, top: int = 1) -> float:
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    return 10 * (best == labels[:, None]).any(axis=1).mean()

def nothing(labels, probabilities):
    return None if len(labels) > 1 else float("inf")

def words(labels, probabilities):
    return "good"

def failing(labels, probabilities):
    raise ValueError("on purpose")
"""
HITS = {"name": "scores:hits", "top": 3}
MCC = "sklearn.metrics:matthews_corrcoef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scores.py").write_text(SCORES)
    return tmp_path


def experiment(folder: Path, *metrics: Any) -> Experiment:
    document = {
        "name": "measured",
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 0.5},
        "model": {"name": "tiny_cnn", "embedding_dim": 4},
        "training": {"num_rounds": 1},
        "method": {"name": "knn_per"},
        "run": {"engine": "serial", "metrics": [*metrics], "save_predictions": True},
    }
    return load_experiment(document, experiment_catalogue(), folder=folder)


def run(folder: Path, *metrics: Any) -> RunFolder:
    chosen = experiment(folder, *metrics)
    made = RunFolder.create(folder / "run", chosen)
    simulate(open_workbench(chosen), made, Observer(), ["test"])
    return made


@pytest.mark.integration
def test_tables_have_them_as_ours(folder: Path) -> None:
    made = run(folder, HITS, "macro_f1", MCC, "scores:nothing")
    table = parquet.read_table(made.path / "predictions.parquet").to_pydict()
    clients, labels = (np.array(table[name]) for name in ("client", "label"))
    with (made.path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        own = clients == row["client"]
        for end, model in (("", "personal"), ("_global", "global")):
            said = np.array(table[f"probabilities_{model}"])[own]
            order = np.argsort(-said, axis=1, kind="stable")[:, :3]
            share = np.mean(
                [one in best for one, best in zip(labels[own], order, strict=True)]
            )
            assert float(row[f"hits{end}"]) == pytest.approx(10 * share)
            expected = matthews_corrcoef(labels[own], said.argmax(axis=1))
            assert float(row[f"matthews_corrcoef{end}"]) == pytest.approx(expected)
            assert row[f"nothing{end}"] == ""
        found.append(float(row["hits"]))
    seen = json.loads((made.path / "results.json").read_text())["seen"]
    assert seen["hits_mean"] == pytest.approx(np.mean(found))
    assert seen["hits_worst"] == pytest.approx(min(found)), "higher is better"
    assert (seen["nothing_mean"], seen["nothing_num_undefined"]) == (None, 5)
    text = as_markdown_report(report_of([made.path]))
    assert "## Seen clients: hits" in text
    assert f"| {seen['hits_weighted']:.3f} |" in text
    # What is written is read again, from another folder too.
    again = read_experiment(made.path / "experiment.yaml", experiment_catalogue())
    assert again.run.metric_names == (
        "hits",
        "macro_f1",
        "matthews_corrcoef",
        "nothing",
    )
    assert to_yaml(again) == to_yaml(
        experiment(folder, HITS, "macro_f1", MCC, "scores:nothing")
    )


def test_other_code_makes_another_run(folder: Path) -> None:
    before = results_identity(experiment(folder, HITS))
    assert before != results_identity(experiment(folder, {**HITS, "top": 2}))
    (folder / "scores.py").write_text(SCORES.replace("10 *", "20 *"))
    assert before != results_identity(experiment(folder, HITS))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["scores:hit"], "has no 'hit'; did you mean 'hits'"),
        ([{**HITS, "topp": 1}], "topp: unknown setting; did you mean 'top'"),
        ([HITS, "scores:hits"], "found hits twice"),
        (["scores:macro_f1"], "found macro_f1 twice"),
        (["macro_f1", "macro_f1"], "found macro_f1 twice"),
        ([3], "found 3, expected a mapping such as"),
    ],
)
def test_what_is_no_metric_is_refused(
    folder: Path, metrics: list[Any], message: str
) -> None:
    with (folder / "scores.py").open("a") as file:
        file.write("\nmacro_f1 = hits\n")
    with pytest.raises(ConfigError) as raised:
        experiment(folder, *metrics)
    assert message in str(raised.value)


def test_failures_are_those_of_the_writer(folder: Path) -> None:
    with pytest.raises(OwnCodeError, match=r"scores\.py.*\n.*failing\n.*on purpose"):
        run(folder, "scores:failing")
    (made,) = computations(experiment(folder, "scores:words").run.metrics).values()
    with pytest.raises(OwnCodeError, match="scores:words returned 'good', expected a"):
        made(np.array([0]), np.eye(1))
    (made,) = computations(experiment(folder, "scores:nothing").run.metrics).values()
    assert made(np.array([0]), np.eye(1)) is None, "infinite"


def test_any_finite_number_can_be_true() -> None:
    one = Evaluation(0, 0, 0.0, (), (), (), metrics={"hits": -7.5})
    assert evaluation_problem(one, metrics=["hits"]) is None
    wrong = replace(one, metrics={"hits": float("inf")})
    assert evaluation_problem(wrong, metrics=["hits"])
