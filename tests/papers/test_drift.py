"""How images are partitioned for the drift figure, and one client's stream by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.partition.schemes import Integers
from knnper.strategies.knn_per import KnnSettings
from papers.drift import (
    ClientDrift,
    DriftSettings,
    DriftStream,
    alarm_steps,
    drift_curves,
    drift_streams,
    follow_client,
    require_enough_images,
)
from papers.memory import Embedded

NUM_TRAIN, NUM_TEST = 600, 120
TRAIN = np.arange(NUM_TRAIN) % 5
TEST = np.arange(NUM_TEST) % 5


def streams(seed: int = 0, alpha: float = 0.3) -> tuple[DriftStream, ...]:
    wanted = DriftSettings(clients=7, alpha=alpha, steps=9, shift_at=4)
    return drift_streams(TRAIN, TEST, wanted, RandomKey(seed))


def before(stream: DriftStream) -> list[int]:
    return _joined([stream.initial, *stream.batches[:4]])


def after(stream: DriftStream) -> list[int]:
    return _joined(stream.batches[4:])


def _joined(parts: Sequence[Integers]) -> list[int]:
    return [int(index) for index in np.concatenate(parts)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.3, 10.0]))
def test_every_image_is_dealt_twice_no_client_grows(seed: int, alpha: float) -> None:
    given = streams(seed, alpha=alpha)
    assert all(len(before(one)) >= len(after(one)) for one in given)
    twice = sorted(index for one in given for index in (*before(one), *after(one)))
    assert twice == sorted([*range(NUM_TRAIN), *range(NUM_TRAIN)])
    tests = np.concatenate([part for one in given for part in one.tests])
    assert sorted(tests.tolist()) == sorted([*range(NUM_TEST), *range(NUM_TEST)])


def test_half_is_stored_at_first_and_batches_are_of_equal_size() -> None:
    for one in streams():
        assert len(one.initial) == (len(before(one)) + 1) // 2
        assert len(one.batches) == 9
        for part in (one.batches[:4], one.batches[4:]):
            sizes = [len(batch) for batch in part]
            assert max(sizes) - min(sizes) <= 1
    for one in streams(alpha=0.1):
        # Tests have the labels of their side.
        for indices, tests in zip((before(one), after(one)), one.tests, strict=True):
            assert set(TEST[tests]) <= set(TRAIN[indices])


def test_the_seed_fixes_a_shuffled_draw_for_each_side() -> None:
    one, again, other = streams(1), streams(1), streams(2)
    assert [before(s) for s in one] == [before(s) for s in again]
    assert [before(s) for s in one] != [before(s) for s in other]
    assert [len(before(s)) for s in one] != [len(after(s)) for s in one]
    largest = max(one, key=lambda stream: len(stream.initial))
    assert largest.initial.tolist() != sorted(largest.initial.tolist())


def test_too_few_images_for_the_clients_are_refused() -> None:
    require_enough_images(1000, 100)
    with pytest.raises(RunError, match="found 101 clients, expected at most 100"):
        require_enough_images(1000, 101)


KEY = RandomKey(0)
ONE_CLIENT = DriftSettings(clients=1, steps=5, shift_at=2)
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
    record = follow_client(CLIENT, replace(ONE_CLIENT, knn_weight=1.0), KNN, KEY)
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
    assert follow_client(wrong, ONE_CLIENT, KNN, KEY)["knn_weight"] == 0.3
    assert follow_client(CLIENT, ONE_CLIENT, KNN, KEY)["knn_weight"] == 0.0


def test_a_store_of_one_can_hold_nothing_out() -> None:
    client = ClientDrift(one(0.0, 0), CLIENT.batches, CLIENT.tests)
    record = follow_client(client, replace(ONE_CLIENT, held_out=1.0), KNN, KEY)
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
