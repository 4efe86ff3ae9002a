"""The figures of the memory, at new clients made by hand."""

from dataclasses import replace

import pytest

from knnper.strategies.knn_per import KnnSettings
from papers.figures import PartRecord
from papers.memory import (
    PANELS,
    MemorySettings,
    Population,
    Service,
    paper_sizes,
)
from tests.papers.clients_by_hand import head, new_client

KNN = KnnSettings(num_neighbors=4, kernel_scale=0.7)
SETTINGS = MemorySettings(
    size=(5, 16),
    capacities=(0.0, 0.5, 1.0),
    knn_weights=(0.0, 0.5, 1.0),
    num_neighbors=(1, 4, 99),
    kernel_scales=(0.1, 0.7),
    imbalances=(0.0, 0.25, 0.5),
)
SIZES = (24, 8, 32, 0)
"""Even, so that no half of them is rounded; 16 on average."""


@pytest.fixture(scope="module")
def deal() -> Population:
    clients = [new_client(size, 15, seed) for seed, size in enumerate(SIZES)]
    return Population(clients, Service(head, KNN, 0.25), SETTINGS)


def global_accuracy(deal: Population) -> float:
    return deal.accuracy(sum(client.test.num_correct() for client in deal.clients))


def lines(name: str, deal: Population) -> dict[str, tuple[float, ...]]:
    """Return the curves of a figure of this deal, seen twice."""
    record = PANELS[name].measure(deal)
    curves = PANELS[name].curves({0.3: [record, record]}, deal.settings)
    for curve in curves:
        assert curve.std == pytest.approx([0.0] * len(curve.x))
    return {curve.label: curve.mean for curve in curves}


def test_without_capacity_clients_serve_the_global_model(deal: Population) -> None:
    points = PANELS["capacity"].measure(deal)["points"]
    assert points[0] == {
        "accuracy": global_accuracy(deal),
        "num_stored": 0,
        "knn_weight": 0.0,
    }
    assert [point["num_stored"] for point in points] == [0, 32, 64]
    assert lines("capacity", deal)["0.3"][1] == deal.at_capacity(0.5)["accuracy"]


def test_curves_by_knn_weight_start_at_the_global_model(deal: Population) -> None:
    by_size, by_scale = lines("knn-weight", deal), lines("kernel-scale", deal)
    assert list(by_size) == ["5", "16"]
    assert list(by_scale) == ["0.1", "0.7"]
    for line in (*by_size.values(), *by_scale.values()):
        assert line[0] == pytest.approx(global_accuracy(deal))
    # 16 on average is all that they have, and 0.7 the scale that is set.
    assert by_size["16"] == by_scale["0.7"]
    assert by_size["5"] != by_size["16"]


def test_neighbours_by_number(deal: Population) -> None:
    chosen, alone = lines("neighbors", deal).values()
    assert chosen[1] == deal.at_capacity(1.0)["accuracy"]
    assert alone[1] == pytest.approx(lines("knn-weight", deal)["16"][-1])
    everything = replace(deal, settings=replace(SETTINGS, num_neighbors=(32, 99)))
    assert len(set(lines("neighbors", everything)["neighbours alone (λ = 1)"])) == 1


def test_a_grid_of_neighbours_is_put_aside(deal: Population) -> None:
    tuning = replace(KNN.tuning, num_neighbors_grid=(1, 2))
    knn = replace(KNN, tuning=tuning)
    tuned = replace(deal, service=replace(deal.service, knn=knn))
    assert lines("neighbors", tuned) == lines("neighbors", deal)


def test_memory_is_dealt_unevenly_but_stays_the_same_in_all(deal: Population) -> None:
    record = PANELS["hardware"].measure(deal)
    homogeneous = deal.at_capacity(0.5)
    assert [record[group][0] for group in ("weak", "strong", "all")] == [
        homogeneous
    ] * 3
    assert [point["num_stored"] for point in record["all"]] == [32, 32, 32]
    assert [point["num_stored"] for point in record["weak"]] == [32, 16, 0]
    assert record["weak"][2]["accuracy"] == global_accuracy(deal)
    assert record["strong"][2] == deal.at_capacity(1.0)
    curves = PANELS["hardware"].curves({0.3: [record]}, deal.settings)
    assert [curve.label for curve in curves] == ["weak", "strong", "average"]
    ends = [record[group][2]["accuracy"] for group in ("weak", "strong", "all")]
    assert ends[2] == pytest.approx((ends[0] + ends[1]) / 2)


def test_no_image_is_lost_to_rounding(deal: Population) -> None:
    clients = [new_client(size, 3, seed) for seed, size in enumerate((5, 7, 12))]
    settings = replace(SETTINGS, imbalances=(0.0, 0.1, 0.21, 0.3, 0.5))
    record = PANELS["hardware"].measure(
        replace(deal, clients=clients, settings=settings)
    )
    assert [point["num_stored"] for point in record["all"]] == [12.0] * 5
    assert [point["num_stored"] for point in record["weak"]] == [11, 10, 6, 4, 0]


def test_the_best_weight_of_each_point(deal: Population) -> None:
    points = PANELS["best-weight"].measure(deal)["points"]
    # Half and all of the images of three clients; the fourth has none.
    assert [point["size"] for point in points] == [12, 24, 4, 8, 16, 32]
    predictor = deal.service.predictor(deal.clients[0], 12)
    assert points[0]["chosen"] == predictor.knn_weight
    first = deal.clients[0].test.num_correct()
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
    chosen, best, together = panel.curves(records, SETTINGS)
    assert best.label.startswith("λ_opt")
    assert chosen.x == best.x == together.x == (4, 8)
    assert chosen.mean == ((0.75 + 0.0) / 2, 1.0)
    # λ = 0 and 1 in the first deal, 0.5 in the second.
    assert best.mean == ((0.5 + 0.5) / 2, 1.0)
    # 3, 2 and 5 are right in the first deal, 0, 1 and 0 in the second.
    assert together.mean == ((1.0 + 0.5) / 2, 1.0)
    assert together.std[0] == pytest.approx(0.125**0.5)
    assert together.std[1] is None
    assert together.details == {"num_points": [3, 1]}
    found = panel.correlations(records)
    assert found["chosen by the client"] == pytest.approx(0.7288, abs=0.0001)
    assert len(found) == 2


def test_the_papers_sizes_scale_with_the_clients() -> None:
    assert paper_sizes(250.0) == (5, 25, 100, 250)
    assert paper_sizes(12.3) == (1, 5, 12)
