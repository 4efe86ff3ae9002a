"""The three-approaches figure with a handful of users."""

import json
import math
from pathlib import Path

import pytest
import torch

from knnper.data.examples import ClientData, Examples
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.reports.figure import colors_of
from knnper.simulation.workbench import open_workbench, simulate
from papers.catalogue import make_figure
from papers.three_approaches import (
    APPROACHES,
    HYPCLUSTER,
    Candidate,
    Measurements,
    ThreeApproachesSettings,
    hypcluster,
    least_losses,
    without_validation,
)
from tests.papers.small_files import experiment

SETTINGS = ThreeApproachesSettings(
    samples=(4, 10),
    clusters=(1, 2),
    users=4,
    seed=5,
    samples_for_clusters=10,
    num_starts=2,
    num_rounds=2,
)


def some(count: int) -> Examples:
    return Examples(torch.ones(count, 1, 1, 1), torch.arange(count))


def test_the_least_losses_by_hand() -> None:
    least = least_losses(100)
    own = -(2 * 0.26 * math.log(0.26) + 48 * 0.01 * math.log(0.01))
    assert least["a model for each user"] == pytest.approx(own)
    # One user is all users, and its own cluster.
    assert list(least_losses(1).values()) == pytest.approx([own] * 3)
    # Of two users each mean density has 0.01 on 46 labels and 0.135 on four.
    pair = -(2 * 0.26 * math.log(0.135) + 48 * 0.01 * math.log(0.01))
    pair += 2 * 0.01 * (math.log(0.01) - math.log(0.135))
    assert least_losses(2)["one model"] == pytest.approx(pair)
    assert own < least["a model for each cluster"] < least["one model"]
    assert least["one model"] < math.log(50)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((8, 2), (6, 2)), ((3, 0), (2, 1)), ((1, 1), (1, 0)), ((0, 0), (0, 0))],
)
def test_candidates_are_compared_on_other_data(
    sizes: tuple[int, int], expected: tuple[int, int]
) -> None:
    data = ClientData(some(sizes[0]), some(sizes[1]))
    divided = without_validation(data)
    assert (len(divided.train), len(divided.validation)) == expected
    joined = divided.train_and_validation().labels
    assert joined.tolist() == list(range(sizes[0]))


def test_the_loss_is_that_of_a_run(tmp_path: Path) -> None:
    data = {"num_users": 4, "num_samples": 10, "seed": 5}
    oracle = experiment(
        data={"name": "synthetic_mixture", **data},
        partition={"name": "natural"},
        model={"name": "softmax_regression"},
        training={"num_rounds": 2, "local_steps": 5, "learning_rate": 1.0},
        method={"name": "fedavg"},
        personalization={"name": "fine_tuning", "num_epochs": 5, "learning_rate": 0.3},
        run={"seed": 5, "engine": "serial"},
    )
    folder = RunFolder.create(tmp_path / "run", oracle)
    run = simulate(open_workbench(oracle), folder, Observer(), ["test"])
    candidate = APPROACHES["Fine-tuning"][0]
    assert candidate.chosen == {"learning_rate": 0.3}
    found = Measurements(SETTINGS, 10).measure([candidate])
    assert found["test_loss"] == pytest.approx(run["seen"]["log_loss"], rel=1e-9)


def test_the_best_candidate_on_validation_data_is_taken() -> None:
    measurements = Measurements(SETTINGS, 10)
    candidates = APPROACHES["Local"]
    alone = [measurements.measure([candidate]) for candidate in candidates]
    best = min(alone, key=lambda record: record["validation_loss"])
    assert measurements.measure(candidates) == best
    assert len({record["validation_loss"] for record in alone}) == len(candidates)


def test_one_cluster_is_the_global_model() -> None:
    measurements = Measurements(SETTINGS, 10)
    fedavg = Candidate({"method": {"name": "fedavg"}}, {}, {})
    expected = measurements.measure([fedavg])
    found = measurements.measure(hypcluster(1, [5], [1.0]))
    assert found["test_loss"] == expected["test_loss"]


def test_methods_have_the_colours_that_they_have_in_reports(tmp_path: Path) -> None:
    shown = make_figure("three-approaches", None, SETTINGS, tmp_path / "f")
    assert [row[0] for row in shown.tables[0].rows] == [*APPROACHES, HYPCLUSTER]
    _, *rows = (tmp_path / "f/three-approaches.csv").read_text().splitlines()
    assert rows[0].startswith("4,,Global (FedAvg),")
    assert rows[-1].startswith("10,2,HypCluster,")
    about = json.loads((tmp_path / "f/three-approaches.json").read_text())
    assert about["least_loss"] == least_losses(4)
    left, right = shown.charts[0].draw().axes
    colors = {line.get_label(): line.get_color() for line in left.lines}
    _, fedavg, local = colors_of(["kNN-Per", "FedAvg", "Local"])
    assert colors["Global (FedAvg)"] == fedavg.light
    assert colors["Local"] == local.light
    assert right.lines[0].get_color() == colors[HYPCLUSTER]
    assert len({colors[title] for title in (*APPROACHES, HYPCLUSTER)}) == 7
