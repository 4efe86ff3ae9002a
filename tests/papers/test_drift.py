"""One client's stream, by hand: each example lies at one of two places."""

from dataclasses import replace

import torch

from knnper.seeding import RandomKey
from knnper.strategies.knn_per import KnnSettings
from papers.drift import (
    ClientDrift,
    DriftSettings,
    alarm_steps,
    drift_curves,
    follow_client,
)
from papers.memory import Embedded

KEY = RandomKey(0)
SETTINGS = DriftSettings(clients=1, steps=5, shift_at=2)
KNN = KnnSettings(num_neighbors=3)


def examples(places: list[float], labels: list[int], believed: int = 0) -> Embedded:
    """Return examples of two labels; the global model believes in one of them."""
    sure = torch.eye(2)[torch.full((len(places),), believed)]
    return Embedded(
        torch.tensor(places).reshape(-1, 1),
        0.6 * sure + 0.4 * (1 - sure),
        torch.tensor(labels, dtype=torch.int64),
    )


def one(place: float, label: int) -> Embedded:
    return examples([place], [label])


CLIENT = ClientDrift(
    initial=examples([0.0, 0.1, 0.2, 0.3], [0, 0, 0, 0]),
    batches=(one(0.4, 0), examples([], []), one(0.01, 1), one(0.02, 1), one(0.03, 1)),
    # After the shift what lies at 0 has the other label.
    tests=(examples([0.0, 0.2], [0, 0]), examples([0.02], [1])),
)


def test_each_strategy_follows_as_it_is_defined() -> None:
    record = follow_client(CLIENT, replace(SETTINGS, knn_weight=1.0), KNN, KEY)
    assert record["num_stored"] == {
        "fixed": [4] * 6,
        "fifo": [4] * 6,
        "concatenate": [4, 5, 5, 6, 7, 8],
    }
    # The nearest three of 0.02 have label 1 in the majority from the second batch on:
    # 0.01, 0.02 and whatever is left of the first store.
    assert record["correct"]["fixed"] == [2, 2, 0, 0, 0, 0]
    assert record["correct"]["fifo"] == [2, 2, 0, 0, 1, 1]
    assert record["correct"]["concatenate"] == [2, 2, 0, 0, 1, 1]
    assert record["num_test"] == [2, 1]
    assert record["global_correct"] == [2, 0]


def test_the_weight_is_chosen_on_the_first_store_alone() -> None:
    # The global model is wrong about all of it, the neighbours are right.
    wrong = ClientDrift(
        examples([0.0, 0.1, 0.2, 0.3, 0.4], [0] * 5, believed=1),
        CLIENT.batches,
        CLIENT.tests,
    )
    assert follow_client(wrong, SETTINGS, KNN, KEY)["knn_weight"] == 0.3
    assert follow_client(CLIENT, SETTINGS, KNN, KEY)["knn_weight"] == 0.0


def test_a_store_of_one_can_hold_nothing_out() -> None:
    client = ClientDrift(one(0.0, 0), CLIENT.batches, CLIENT.tests)
    record = follow_client(client, replace(SETTINGS, held_out=1.0), KNN, KEY)
    assert record["knn_weight"] == 0.0
    assert set(record["alarmed_at"].values()) == {None}


def test_alarms_go_off_after_the_shift_only() -> None:
    generator = torch.Generator().manual_seed(0)

    def arriving(place: float, label: int, count: int) -> Embedded:
        noise = torch.randn(count, 4, generator=generator)
        labels = torch.full((count,), label)
        return Embedded(place + noise, torch.full((count, 2), 0.5), labels)

    quiet = [arriving(0.0, 0, 10) for _ in range(5)]
    fitted, held_out = arriving(0.0, 0, 200), arriving(0.0, 0, 50)
    settings = DriftSettings(run_length=1000.0)
    moved = [*quiet, *(arriving(8.0, 0, 10) for _ in range(5))]
    found = alarm_steps(fitted, held_out, moved, settings, KEY)
    assert found == {"distance": 6, "distance_to_own_label": 6}
    relabelled = [*quiet, *(arriving(0.0, 1, 10) for _ in range(5))]
    found = alarm_steps(fitted, held_out, relabelled, settings, KEY)
    assert found == {"distance": None, "distance_to_own_label": 6}


def test_clients_are_pooled_by_their_test_images() -> None:
    def record(num_test: list[int], correct: list[int], alarmed: int | None) -> object:
        curve = dict.fromkeys(("fixed", "fifo", "concatenate"), correct)
        return {
            "knn_weight": 0.5,
            "num_test": num_test,
            "global_correct": [1, 0],
            "correct": curve,
            "num_stored": curve,
            "alarmed_at": {"distance": alarmed, "distance_to_own_label": None},
        }

    records = [record([4, 1], [4, 2, 1], 1), record([6, 3], [1, 1, 1], None)]
    curves = drift_curves(records, num_steps=2, shift_at=2)  # type: ignore[arg-type]
    assert curves.accuracy["fifo"] == [0.5, 0.3, 0.5]
    assert curves.accuracy["global"] == [0.2, 0.2, 0.0]
    assert curves.mean_stored["fixed"] == [2.5, 1.5, 1.0]
    assert curves.alarmed["distance"] == [0.0, 0.5, 0.5]
