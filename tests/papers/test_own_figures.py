"""The figures of ProtoNN, quality, FedBasis' collapse and three approaches."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import papers.collapse
from knnper.data.examples import ClientData, Examples
from knnper.datastore.memory import KnnSettings
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.engines import simulate
from knnper.simulation.reports.estimate import estimate
from knnper.simulation.reports.figure import colors_of
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedbasis import FedBasisSettings, local_round
from papers.catalogue import make_figure
from papers.collapse import (
    VARIANTS,
    BasesFollowed,
    follow_bases,
    mean_entropy,
    mean_similarity,
    settings_of,
)
from papers.figures import PartRecord
from papers.new_clients import Embedded
from papers.protonn import (
    ClientSplits,
    ProtoNNFigureSettings,
    cells_of,
    completed,
    compress_client,
    paper_dims,
    points_of,
)
from papers.quality import CentralTraining, QualitySettings
from papers.three_approaches import (
    APPROACHES,
    HYPCLUSTER,
    CandidateSettings,
    Measurements,
    ThreeApproachesSettings,
    hypcluster,
    least_losses,
    without_validation,
)
from tests.papers.small_files import BASE, experiment, quiet

pytestmark = pytest.mark.integration

KEY = RandomKey(0)
PROTONN = ProtoNNFigureSettings(capacity=(0.2, 1.0), dim=(2, 4), steps=5)
CELLS = cells_of(PROTONN)
KNN = KnnSettings()


def blobs(count: int, seed: int) -> Embedded:
    """Return two far labels in four dimensions; the global model says always 0."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    embeddings = torch.randn(count, 4, generator=generator)
    embeddings[:, 0] += 20.0 * labels
    sure = torch.tensor([0.6, 0.4]).repeat(count, 1)
    return Embedded(embeddings, sure, labels)


def test_separable_labels_survive_compression() -> None:
    client = ClientSplits(blobs(30, 1), blobs(10, 2), blobs(20, 3))
    record = compress_client(client, CELLS, KNN, KEY)
    assert record["num_test"] == 20
    assert record["global_correct"] == 10
    # All right with the smallest λ that outvotes the global model.
    assert record["store"] == [20, 10, 0.3, 40 * (4 * 4 + 8)]
    assert [cell[:2] for cell in record["cells"]] == [[20, 10]] * 4
    # W is (d̂, 4), B (m, d̂) and Z (m, 2), with 40 examples to be remembered.
    sizes = [cell[3] for cell in record["cells"]]
    numbers = [(d * 4, m * d, m * 2) for d in (2, 4) for m in (8, 40)]
    assert all(
        size <= 4 * sum(parts) for size, parts in zip(sizes, numbers, strict=True)
    )


@pytest.mark.parametrize(("num_train", "num_validation"), [(0, 0), (0, 4), (3, 0)])
def test_without_evidence_it_is_global(num_train: int, num_validation: int) -> None:
    client = ClientSplits(blobs(num_train, 1), blobs(num_validation, 2), blobs(6, 3))
    record = compress_client(client, CELLS, KNN, KEY)
    measured = [record["store"], *record["cells"]]
    assert [one[:3] for one in measured] == [[3, 0, 0.0]] * 5


def test_the_same_key_gives_the_same_record() -> None:
    client = ClientSplits(blobs(9, 1), blobs(5, 2), blobs(6, 3))
    first = compress_client(client, CELLS, KNN, KEY)
    assert compress_client(client, CELLS, KNN, KEY) == first


def test_clients_are_pooled_by_their_images() -> None:
    one_cell = cells_of(replace(PROTONN, capacity=(0.2,), dim=(2,)))

    def record(num_test: int, correct: int, weight: float) -> PartRecord:
        return {
            "num_test": num_test,
            "num_validation": 10,
            "global_correct": 1,
            "store": [correct, 5, weight, 100],
            "cells": [[correct - 1, 4, weight, 50]],
        }

    records = [record(3, 2, 0.5), record(5, 4, 1.0)]
    (cell, store), global_accuracy = points_of(records, one_cell)
    assert global_accuracy == 0.25
    assert store.accuracy == 0.75
    assert (cell.capacity, cell.projection_dim) == (0.2, 2)
    assert (cell.accuracy, cell.validation_accuracy) == (0.5, 0.4)
    assert (cell.mean_knn_weight, cell.mean_bytes) == (0.75, 50)
    with pytest.raises(RunError, match="found no test images at 1 clients"):
        points_of([{**record(0, 0, 0.0)}], one_cell)


def test_the_papers_dimensions_scale_with_the_embedding() -> None:
    assert paper_dims(1280) == (*range(100, 1300, 100), 1280)
    assert paper_dims(512) == (*range(40, 520, 40), 512)
    assert paper_dims(3) == (1, 2, 3)


def test_no_projection_to_more_dimensions() -> None:
    assert completed(ProtoNNFigureSettings(dim=(64, 1)), 64).dim == (1, 64)
    with pytest.raises(RunError, match="to 65 dimensions, expected at most 64"):
        completed(ProtoNNFigureSettings(dim=(4, 65)), 64)


QUALITY = QualitySettings(epochs=(2.0, 0.0), alpha=(0.1, 1.0), partitions=2)

EXPERIMENT = experiment(
    partition={
        "name": "iid",
        "num_clients": 6,
        "unseen_fraction": 0.34,
        "validation_fraction": 0.3,
    },
    model={"name": "tiny_cnn", "embedding_dim": 8},
    training={"batch_size": 16, "learning_rate": 0.05},
    personalization={"name": "knn", "num_neighbors": 5},
    method={"name": "fedavg"},
    run={},
)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return open_workbench(EXPERIMENT)


def test_stages_are_steps_of_one_training(bench: Workbench, tmp_path: Path) -> None:
    key = RandomKey(1)
    training = CentralTraining(bench, (0.0, 0.5), tmp_path, key)
    seen = [part for part in bench.partition.clients if part.seen]
    num_examples = sum(len(part.train) + len(part.validation) for part in seen)
    assert len(training.examples) == num_examples
    assert torch.equal(training.weights_at(1), bench.task.initial_weights)
    steps = round(0.5 * (num_examples // 16))
    task = replace(bench.task, training=replace(bench.task.training, local_steps=steps))
    start = bench.task.initial_weights
    expected = local_sgd(task, start, training.examples, 0.05, key.child("stage", 2))
    assert expected.num_steps == steps
    assert torch.equal(training.weights_at(2), expected.weights)
    # Another process goes on from what is kept.
    again = CentralTraining(bench, (0.0, 0.5), tmp_path, key)
    assert torch.equal(again.weights_at(2), expected.weights)


def test_a_better_model_has_better_neighbours(tmp_path: Path) -> None:
    shown = make_figure("quality", EXPERIMENT, QUALITY, tmp_path / "q", quiet)
    for table in shown.tables:
        found = [
            [float(cell.rstrip(" %")) for cell in cells] for _, *cells in table.rows
        ]
        (worse, better), *lines = found
        assert worse < 30 < 50 < better
        assert all(first < last for first, last in lines)
    rows = (tmp_path / "q" / "quality.csv").read_text().splitlines()
    assert rows[0] == "kind,alpha,global_accuracy,accuracy,accuracy_std,epochs"
    assert len(rows) == 1 + 2 * 2 * 2
    assert [row.split(",")[-1] for row in rows[1:3]] == ["0.0", "2.0"]


def small(**method: Any) -> Experiment:
    return experiment(
        partition={**BASE["partition"], "num_clients": 5, "unseen_fraction": 0.2},
        model={"name": "mlp", "hidden_sizes": [8]},
        training={"num_rounds": 2, "participation": 0.75},
        method=method,
    )


def test_the_entropy_is_a_fraction_of_the_uniform_one() -> None:
    assert mean_entropy(torch.full((4, 2), 0.25)) == pytest.approx(1.0)
    assert mean_entropy(torch.tensor([[1.0], [0.0]])) == 0.0
    # One block as sure as can be, the other of ¼ and ¾.
    mixed = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    both = torch.tensor([[1.0, 0.25], [0.0, 0.75]])
    assert mean_entropy(both) == pytest.approx(mixed / 2)
    assert mean_entropy(torch.ones(1, 3)) == 1.0


def test_the_similarity_is_the_mean_over_pairs() -> None:
    east, north, west = (torch.tensor(v) for v in ([2.0, 0.0], [0.0, 1.0], [-3.0, 0.0]))
    assert mean_similarity([east, north]) == 0.0
    assert mean_similarity([east, east]) == pytest.approx(1.0)
    # 0, -1 and 0.
    assert mean_similarity([east, north, west]) == pytest.approx(-1 / 3)


def test_what_is_treated() -> None:
    settings = FedBasisSettings(num_bases=5, temperature=0.3)
    nothing, descent, sharpened, warm, every = [
        treat(settings) for treat in VARIANTS.values()
    ]
    untreated: dict[str, Any] = {"major_basis": False, "coordinate_descent": False}
    untreated |= {"temperature": 1.0, "warm_start_fraction": 0.0}
    assert nothing == FedBasisSettings(num_bases=5, **untreated)
    assert descent == replace(nothing, coordinate_descent=True)
    assert sharpened == replace(descent, temperature=0.3)
    assert warm == replace(nothing, warm_start_fraction=0.3)
    assert every == settings


def follow(**method: Any) -> BasesFollowed:
    return follow_bases(open_workbench(small(name="fedbasis", **method)))


def test_bases_are_followed_from_round_to_round() -> None:
    settings = {"num_bases": 2, "major_basis": False, "warm_start_fraction": 0.0}
    record = follow(**settings, unseen_epochs=1).as_record()
    assert record == follow(**settings, unseen_epochs=1).as_record()
    assert len(record["similarity"]) == len(record["entropy"]) == 3
    assert all(-1 <= value <= 1 for value in record["similarity"])
    assert record["entropy"][0] == 1.0
    assert all(0 < value < 1 for value in record["entropy"][1:])
    assert 0 < record["accuracy"] <= 1
    assert 0 <= record["unseen_accuracy"] <= 1


def test_there_are_no_bases_in_the_warm_start() -> None:
    record = follow(num_bases=2, warm_start_fraction=0.5).as_record()
    assert record["similarity"][0] is None
    assert record["similarity"][1:] == pytest.approx([1.0, 1.0], abs=0.1)
    assert record["entropy"][:2] == [1.0, 1.0]
    assert record["entropy"][2] < 1.0


def test_what_is_followed_is_a_run(tmp_path: Path) -> None:
    experiment = small(name="fedbasis", num_bases=2, warm_start_fraction=0.5)
    folder = RunFolder.create(tmp_path / "run", experiment)
    found = follow_bases(open_workbench(experiment))
    run = simulate(open_workbench(experiment), folder, Observer(), ["test"])
    assert found.trained.fingerprint == run["training"]["state_sha256"]
    record = found.as_record()
    for group, name in (("seen", "accuracy"), ("unseen", "unseen_accuracy")):
        assert record[name] == run[group]["accuracy_weighted"]


def test_a_client_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_workbench(small(name="fedbasis", num_bases=2))
    largest = max(bench.roster.trainable().values())

    def breaking(*arguments: Any) -> Any:
        alpha, update = local_round(*arguments)
        if len(arguments[3]) < largest:
            return alpha, update
        return alpha, replace(update, models=tuple(one / 0.0 for one in update.models))

    whole = follow_bases(bench)
    monkeypatch.setattr(papers.collapse, "local_round", breaking)
    without = follow_bases(bench)
    assert without.trained.fingerprint != whole.trained.fingerprint
    assert all(model.isfinite().all() for model in without.trained.state.models)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg"}, "found the method fedavg, expected fedbasis"),
        ({"name": "fedbasis", "num_bases": 1}, r"num_bases 1, expected 2 or more"),
    ],
)
def test_it_needs_bases_to_compare(method: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        settings_of(small(**method))


HANDFUL = ThreeApproachesSettings(
    samples=(4, 10),
    clusters=(1, 2),
    users=4,
    seeds=(5, 6),
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
    found = Measurements(HANDFUL, 5, 10).measure([candidate])
    assert found["test_loss"] == pytest.approx(run["seen"]["log_loss"], rel=1e-9)


def test_the_best_candidate_on_validation_data_is_taken() -> None:
    measurements = Measurements(HANDFUL, 5, 10)
    candidates = APPROACHES["Local"]
    alone = [measurements.measure([candidate]) for candidate in candidates]
    best = min(alone, key=lambda record: record["validation_loss"])
    assert measurements.measure(candidates) == best
    assert len({record["validation_loss"] for record in alone}) == len(candidates)


def test_one_cluster_is_the_global_model() -> None:
    measurements = Measurements(HANDFUL, 5, 10)
    fedavg = CandidateSettings({"method": {"name": "fedavg"}}, {}, {})
    expected = measurements.measure([fedavg])
    found = measurements.measure(hypcluster(1, [5], [1.0]))
    assert found["test_loss"] == expected["test_loss"]


def test_methods_have_the_colours_that_they_have_in_reports(tmp_path: Path) -> None:
    settings = replace(HANDFUL, samples=(4,))
    shown = make_figure("three-approaches", None, settings, tmp_path / "f")
    assert [row[0] for row in shown.tables[0].rows] == [*APPROACHES, HYPCLUSTER]
    losses = [
        Measurements(HANDFUL, seed, 4).measure(APPROACHES["Local"])["test_loss"]
        for seed in HANDFUL.seeds
    ]
    told = estimate(losses).text(scale=1.0, digits=3)
    assert shown.tables[0].rows[1][1] == told
    assert losses[0] != losses[1]
    _, *rows = (tmp_path / "f/three-approaches.csv").read_text().splitlines()
    assert rows[0].startswith("5,4,,Global (FedAvg),")
    assert rows[1].startswith("6,4,,Global (FedAvg),")
    assert rows[-1].startswith("6,10,2,HypCluster,")
    about = json.loads((tmp_path / "f/three-approaches.json").read_text())
    assert about["least_loss"] == least_losses(4)
    left, right = shown.charts[0].figure.axes
    colors = {line.get_label(): line.get_color() for line in left.lines}
    _, fedavg, local = colors_of(["kNN-Per", "FedAvg", "Local"])
    assert colors["Global (FedAvg)"] == fedavg.light
    assert colors["Local"] == local.light
    assert right.lines[0].get_color() == colors[HYPCLUSTER]
    assert len({colors[title] for title in (*APPROACHES, HYPCLUSTER)}) == 7
