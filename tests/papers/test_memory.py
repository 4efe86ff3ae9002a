"""The figures of the memory: images split anew, new clients, each panel."""

import csv
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore.memory import KnnSettings
from knnper.datastore.tuning import ParameterGrid
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.partition.clients import Clients
from knnper.simulation.reports.table import Shown
from knnper.simulation.trained_model import TrainedModel, trained_model
from papers.catalogue import make_figure
from papers.figures import OnPart, PartRecord
from papers.memory import (
    PANELS,
    MemorySettings,
    PanelName,
    Population,
    completed,
    paper_sizes,
)
from papers.new_clients import (
    Embedded,
    NewClient,
    NewClientService,
    UnseenImages,
    count_correct,
    count_correct_with_each,
    size_at,
)
from tests.papers.small_files import quiet

pytestmark = pytest.mark.integration

KEY = RandomKey(5)


@pytest.fixture(scope="module")
def model(run: Path) -> TrainedModel:
    return trained_model(run)


@pytest.fixture(scope="module")
def pool(model: TrainedModel) -> UnseenImages:
    return UnseenImages(model)


def test_the_pool_is_the_unseen_clients(
    model: TrainedModel, pool: UnseenImages
) -> None:
    unseen = [part for part in model.partition.clients if not part.seen]
    assert pool.num_clients == len(unseen) == 2
    assert len(pool.known) == pool.num_known
    assert pool.num_known == sum(len(p.train) + len(p.validation) for p in unseen)
    assert len(pool.test) == sum(len(part.test) for part in unseen)
    image = model.dataset.train.examples_at(unseen[0].train).images
    found = (pool.known.embeddings[:, None] - model.embed(image)[None]).abs().sum(dim=2)
    assert bool((found.min(dim=0).values < 1e-4).all())


def test_partition_assigns_each_image_once(pool: UnseenImages) -> None:
    clients = pool.partition(4, 0.3, KEY)
    assert len(clients) == 4
    for name in ("known", "test"):
        assigned = torch.cat([getattr(client, name).embeddings for client in clients])
        whole = getattr(pool, name).embeddings
        assert sorted(assigned.tolist()) == sorted(whole.tolist())


def test_not_more_clients_than_images(model: TrainedModel, pool: UnseenImages) -> None:
    pool.require_clients(pool.num_known)
    with pytest.raises(RunError, match=rf"found 9999 .* at most {pool.num_known}, the"):
        pool.require_clients(9999)
    clients = Clients.of(
        [
            replace(one, test=one.test if one.seen else one.test[:0])
            for one in model.partition.clients
        ]
    )
    bench = replace(model.bench, partition=replace(model.partition, clients=clients))
    with pytest.raises(RunError, match="found no test images at the 2 unseen clients"):
        UnseenImages(replace(model, bench=bench)).require_clients(1)


NUM_CLASSES = 3


def head(embeddings: Tensor) -> Tensor:
    """Return the global model's probabilities: the first three numbers decide."""
    return torch.softmax(embeddings[:, :NUM_CLASSES], dim=1)


def embedded(count: int, seed: int) -> Embedded:
    """Return images whose labels the global model knows in part."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(count, 5, generator=generator)
    noise = torch.randn(count, NUM_CLASSES, generator=generator)
    labels = (embeddings[:, :NUM_CLASSES] + embeddings[:, 2:] + noise).argmax(dim=1)
    return Embedded(embeddings, head(embeddings), labels)


def new_client(num_known: int, num_test: int, seed: int) -> NewClient:
    """Return a client with so many images."""
    return NewClient(embedded(num_known, seed), embedded(num_test, 1000 + seed))


KNN = KnnSettings(num_neighbors=4, kernel_scale=0.7)
SERVICE = NewClientService(head, KNN, 0.25)


def votes(stored: Embedded, queries: Embedded, k: int, scale: float) -> NDArray[Any]:
    """Return p_kNN of each query, one neighbour after the other."""
    found = np.zeros((len(queries), NUM_CLASSES))
    for row, query in enumerate(queries.embeddings.double()):
        distances = [float((query - one).norm()) for one in stored.embeddings.double()]
        for near in np.argsort(distances)[:k]:
            label = int(stored.labels[near])
            found[row, label] += np.exp(-distances[near] / scale)
    return cast("NDArray[Any]", found / found.sum(axis=1, keepdims=True))


def right(stored: Embedded, queries: Embedded, weight: float) -> int:
    """Return how many queries the mixture gets right."""
    local = votes(stored, queries, KNN.num_neighbors, KNN.kernel_scale)
    mixed = weight * local + (1 - weight) * queries.probabilities.numpy()
    return int((mixed.argmax(axis=1) == queries.labels.numpy()).sum())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_what_an_exhaustive_search_serves(seed: int) -> None:
    client = new_client(30, 40, seed)
    # Of the first 20 images, 5 are held out and 15 looked up.
    held, rest = client.known.at(slice(0, 5)), client.known.at(slice(5, 20))
    scores = {weight: right(rest, held, weight) for weight in KNN.knn_weights}
    chosen = max(scores, key=lambda weight: (scores[weight], -weight))
    predictor = SERVICE.predictor(client, 20)
    assert predictor.knn_weight == chosen
    expected = right(client.known.at(slice(0, 20)), client.test, chosen)
    assert count_correct(predictor, client) == expected


def test_with_one_image_or_none_it_is_the_global_model() -> None:
    client = new_client(8, 20, 4)
    predictor, right = SERVICE.predictor(client, 0), client.test.num_correct()
    assert torch.equal(predictor(client.test.embeddings), client.test.probabilities)
    assert count_correct(predictor, client) == right
    grid = ParameterGrid.of((0.0, 0.5, 1.0), (4,), (0.7,))
    counts = count_correct_with_each(client, 0, KNN, grid).flatten().tolist()
    assert counts == [right] * 3
    # Some image is left to be looked up.
    predictor = NewClientService(head, KNN, 0.9).predictor(new_client(1, 5, 8), 1)
    assert (predictor.neighbors.num_stored, predictor.knn_weight) == (1, 0)


def test_test_images_are_not_looked_at_to_choose() -> None:
    known = new_client(30, 0, 5).known
    blind = NewClient(known, cast(Embedded, None))
    assert SERVICE.predictor(blind, 30).knn_weight == pytest.approx(
        SERVICE.predictor(new_client(30, 9, 5), 30).knn_weight
    )


def test_a_curve_is_what_each_weight_serves() -> None:
    client = new_client(25, 60, 6)
    grid = ParameterGrid.of((0.0, 0.3, 1.0), (4,), (0.7,))
    curve = count_correct_with_each(client, 25, KNN, grid)[:, 0, 0].tolist()
    assert curve == [right(client.known, client.test, one) for one in (0.0, 0.3, 1.0)]
    assert client.test.num_correct() == curve[0] != curve[2]
    # More neighbours than images are all of them.
    few, grid = new_client(3, 50, 7), ParameterGrid.of((1.0,), (3, 4, 100), (0.7,))
    counts = count_correct_with_each(few, 3, KNN, grid).flatten().tolist()
    assert counts == [right(few.known, few.test, 1.0)] * 3


@pytest.mark.parametrize(
    ("num_known", "capacity", "expected"),
    [(10, 0.0, 0), (10, 0.34, 3), (10, 0.35, 4), (7, 1.0, 7), (0, 0.5, 0), (3, 9.0, 3)],
)
def test_a_capacity_in_images(num_known: int, capacity: float, expected: int) -> None:
    assert size_at(num_known, capacity) == expected


PANEL_SETTINGS = MemorySettings(
    size=(5, 16),
    capacities=(0.0, 0.5, 1.0),
    knn_weights=(0.0, 0.5, 1.0),
    num_neighbors=(1, 4, 99),
    kernel_scales=(0.1, 0.7),
    imbalances=(0.0, 0.25, 0.5),
)
SIZES = (24, 8, 32, 0)  # even, so that no half of them is rounded; 16 on average


@pytest.fixture(scope="module")
def population() -> Population:
    clients = [new_client(size, 15, seed) for seed, size in enumerate(SIZES)]
    return Population(clients, NewClientService(head, KNN, 0.25), PANEL_SETTINGS)


def global_accuracy(population: Population) -> float:
    return population.accuracy(
        sum(client.test.num_correct() for client in population.clients)
    )


def lines(name: str, population: Population) -> dict[str, tuple[float, ...]]:
    """Return the curves of a figure of this population, seen twice."""
    record = PANELS[name].measure(population)
    curves = PANELS[name].curves({0.3: [record, record]}, population.settings)
    for curve in curves:
        assert curve.std == pytest.approx([0.0] * len(curve.x))
    return {curve.label: curve.mean for curve in curves}


def test_without_capacity_clients_serve_the_global_model(
    population: Population,
) -> None:
    points = PANELS["capacity"].measure(population)["points"]
    nothing = {"num_stored": 0, "knn_weight": 0.0}
    assert points[0] == {"accuracy": global_accuracy(population), **nothing}
    assert [point["num_stored"] for point in points] == [0, 32, 64]
    assert (
        lines("capacity", population)["0.3"][1]
        == population.at_capacity(0.5)["accuracy"]
    )


def test_curves_by_knn_weight_start_at_the_global_model(population: Population) -> None:
    by_size, by_scale = (
        lines("knn-weight", population),
        lines("kernel-scale", population),
    )
    assert list(by_size) == ["5", "16"]
    assert list(by_scale) == ["0.1", "0.7"]
    for line in (*by_size.values(), *by_scale.values()):
        assert line[0] == pytest.approx(global_accuracy(population))
    # 16 on average is all that they have, and 0.7 the scale that is set.
    assert by_size["16"] == by_scale["0.7"]
    assert by_size["5"] != by_size["16"]


def test_neighbours_by_number(population: Population) -> None:
    chosen, alone = lines("neighbors", population).values()
    assert chosen[1] == population.at_capacity(1.0)["accuracy"]
    assert alone[1] == pytest.approx(lines("knn-weight", population)["16"][-1])
    everything = replace(
        population, settings=replace(PANEL_SETTINGS, num_neighbors=(32, 99))
    )
    assert len(set(lines("neighbors", everything)["neighbours alone (λ = 1)"])) == 1
    # A grid that is set for clients is put aside.
    knn = replace(KNN, tuning=replace(KNN.tuning, num_neighbors_grid=(1, 2)))
    tuned = replace(population, service=replace(population.service, knn=knn))
    assert lines("neighbors", tuned) == lines("neighbors", population)


def test_uneven_memory_has_the_same_total(population: Population) -> None:
    record = PANELS["hardware"].measure(population)
    homogeneous = population.at_capacity(0.5)
    groups = ("weak", "strong", "all")
    assert [record[group][0] for group in groups] == [homogeneous] * 3
    assert [point["num_stored"] for point in record["all"]] == [32, 32, 32]
    assert [point["num_stored"] for point in record["weak"]] == [32, 16, 0]
    assert record["weak"][2]["accuracy"] == global_accuracy(population)
    assert record["strong"][2] == population.at_capacity(1.0)
    curves = PANELS["hardware"].curves({0.3: [record]}, population.settings)
    assert [curve.label for curve in curves] == ["weak", "strong", "average"]
    ends = [record[group][2]["accuracy"] for group in groups]
    assert ends[2] == pytest.approx((ends[0] + ends[1]) / 2)


def test_no_image_is_lost_to_rounding(population: Population) -> None:
    clients = [new_client(size, 3, seed) for seed, size in enumerate((5, 7, 12))]
    settings = replace(PANEL_SETTINGS, imbalances=(0.0, 0.1, 0.21, 0.3, 0.5))
    uneven = replace(population, clients=clients, settings=settings)
    record = PANELS["hardware"].measure(uneven)
    assert [point["num_stored"] for point in record["all"]] == [12.0] * 5
    assert [point["num_stored"] for point in record["weak"]] == [11, 10, 6, 4, 0]


def test_the_best_weight_of_each_point(population: Population) -> None:
    points = PANELS["best-weight"].measure(population)["points"]
    # Half and all of the images of three clients; the fourth has none.
    assert [point["size"] for point in points] == [12, 24, 4, 8, 16, 32]
    predictor = population.service.predictor(population.clients[0], 12)
    assert points[0]["chosen"] == predictor.knn_weight
    first = population.clients[0].test.num_correct()
    assert points[0]["correct"][0] == first
    assert len(points[0]["correct"]) == len(KNN.knn_weights)


def test_the_best_weight_by_size() -> None:
    def point(size: int, chosen: float, *correct: int) -> PartRecord:
        return {"size": size, "chosen": chosen, "correct": list(correct)}

    # 4 and 7 count as one size. Of equals the smallest λ is the best.
    first: PartRecord = {
        "weights": [0.0, 0.5, 1.0],
        "points": [point(4, 0.5, 2, 2, 1), point(7, 1.0, 1, 0, 4)],
    }
    second = {"points": [point(5, 0.0, 0, 1, 0), point(8, 1.0, 0, 3, 9)]}
    records = {0.3: [first, second]}
    panel = PANELS["best-weight"]
    chosen, best, together = panel.curves(records, PANEL_SETTINGS)
    assert best.label.startswith("λ_opt")
    assert chosen.x == best.x == together.x == (4, 8)
    assert chosen.mean == ((0.75 + 0.0) / 2, 1.0)
    # λ = 0 and 1 in the first partition, 0.5 in the second.
    assert best.mean == ((0.5 + 0.5) / 2, 1.0)
    # 3, 2 and 5 are right in the first partition, 0, 1 and 0 in the second.
    assert together.mean == ((1.0 + 0.5) / 2, 1.0)
    assert together.std[0] == pytest.approx(0.125**0.5)
    assert together.std[1] is None
    assert together.details == {"num_points": [3, 1]}
    found = panel.correlations(records)
    assert found["chosen by the client"] == pytest.approx(0.7288, abs=0.0001)
    assert len(found) == 2


def test_settings_follow_the_run_and_the_paper(model: TrainedModel) -> None:
    assert paper_sizes(250.0) == (5, 25, 100, 250)
    assert paper_sizes(12.3) == (1, 5, 12)
    found = completed(MemorySettings(), UnseenImages(model))
    assert (found.clients, found.size[-1] > 100) == (2, True)
    assert NewClientService.of(model).validation_fraction == 0.2


SETTINGS = MemorySettings(
    clients=3,
    alpha=(0.1, 1.0),
    size=(2, 20),
    partitions=2,
    seed=1,
    capacities=(0.0, 0.5, 1.0),
    knn_weights=(0.0, 0.5, 1.0),
    num_neighbors=(1, 10),
    kernel_scales=(1.0,),
    imbalances=(0.0, 0.5),
)


def make(
    model: TrainedModel, output: Path, *only: PanelName, on_part: OnPart = quiet
) -> Shown:
    settings = replace(SETTINGS, only=only)
    return make_figure("memory", model, settings, output, on_part)


def test_a_resumed_figure_is_the_same(model: TrainedModel, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 6
        if done == 3:
            raise KeyboardInterrupt

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    names: tuple[PanelName, ...] = ("capacity", "best-weight")
    shown = make(model, whole, *names)
    with pytest.raises(KeyboardInterrupt):
        make(model, resumed, *names, on_part=interrupt)
    assert make(model, resumed, *names).tables == shown.tables
    assert len((resumed / "parts.jsonl").read_text().splitlines()) == 7
    for name in names:
        for file in (f"{name}.{ending}" for ending in ("csv", "png", "svg", "pdf")):
            assert (whole / file).read_bytes() == (resumed / file).read_bytes(), file
    with (whole / "capacity.csv").open() as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    places = [(row["alpha"], row["capacity"]) for row in rows]
    assert places == list(product(("0.1", "1"), ("0.0", "0.5", "1.0")))
    assert rows[0]["accuracy"] == rows[3]["accuracy"]
    assert float(rows[0]["accuracy_std"]) == 0


def test_figures_of_a_folder_share_clients(model: TrainedModel, tmp_path: Path) -> None:
    (one,) = make(model, tmp_path, "hardware").tables
    assert not (tmp_path / "neighbors.csv").exists()
    (other,) = make(model, tmp_path, "neighbors").tables
    # A strong client with ΔC = 0.5 has all its images, and k is 10.
    assert one.rows[1][-1] == other.rows[0][-1]
