"""The drift figure: partition, streams and alarm by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.memory import KnnSettings
from knnper.datastore.store import memory_store
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.partition.allocation import Integers
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
from papers.drift_alarm import (
    EXPONENTS,
    NUM_BETS,
    AlarmState,
    DriftAlarm,
    RankedScores,
    Scores,
    label_scores,
    log_bets,
    log_mean,
    neighbor_scores,
)
from papers.new_clients import Embedded

pytestmark = pytest.mark.integration

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
def test_streams_have_each_image_twice_and_no_client_grows(
    seed: int, alpha: float
) -> None:
    given = streams(seed, alpha=alpha)
    assert all(len(before(one)) >= len(after(one)) for one in given)
    twice = sorted(index for one in given for index in (*before(one), *after(one)))
    assert twice == sorted([*range(NUM_TRAIN), *range(NUM_TRAIN)])
    tests = np.concatenate([part for one in given for part in one.tests])
    assert sorted(tests.tolist()) == sorted([*range(NUM_TEST), *range(NUM_TEST)])


def test_half_is_stored_at_first_and_batches_are_of_equal_size() -> None:
    assert list(streams())
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


THRESHOLDS = np.linspace(0.0, 1.0, 41)


def test_p_values_by_hand() -> None:
    ranked = RankedScores(np.array([1.0, 2.0, 2.0, 3.0]))
    assert ranked.add(2.0, 0.5) == (1 + 0.5 * 3) / 5
    assert ranked.add(0.0, 0.25) == (5 + 0.25) / 6
    assert ranked.add(np.inf, 0.25) == 0.25 / 7
    assert ranked.add(np.inf, 0.25) == 0.5 / 8
    assert ranked.ascending().tolist() == [0, 1, 2, 2, 2, 3, np.inf, np.inf]


def test_p_values_keep_away_from_the_ends() -> None:
    below_one = np.nextafter(1.0, 0.0)
    assert RankedScores(np.ones(3)).add(2.0, 1e-300) > 0
    assert RankedScores(np.ones(3)).add(0.0, below_one) < 1
    assert np.isfinite(log_bets(np.array([2.0**-53, 1 - 2.0**-53]))).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_an_exchangeable_score_has_a_uniform_p_value(scores: list[int]) -> None:
    """Given all scores, any is as likely to be the last; θ spreads it evenly."""
    probability = np.zeros(len(THRESHOLDS))
    for last, score in enumerate(scores):
        others = np.sort(np.array(scores[:last] + scores[last + 1 :], np.float64))
        low = RankedScores(others).add(score, 0.0)
        high = RankedScores(others).add(score, 1.0)
        probability += np.clip((THRESHOLDS - low) / (high - low), 0, 1) / len(scores)
    assert probability == pytest.approx(THRESHOLDS, abs=1e-9)


def test_bets_by_hand() -> None:
    bets = np.exp(log_bets(np.array([0.25, 0.75])))
    assert bets.shape == (2, NUM_BETS)
    strongest = EXPONENTS.index(0.2)
    assert bets[0, strongest] == pytest.approx(0.2 * 0.25**-0.8)
    assert bets[1, strongest] == pytest.approx(0.2 * 0.75**-0.8)
    assert bets[0, NUM_BETS // 2 :] == pytest.approx(bets[1, : NUM_BETS // 2])


def test_uniform_p_values_win_nothing_on_average() -> None:
    """The integral of g over p = exp(-s); those of 1 - p are the same by symmetry."""
    step = 0.001
    s = np.arange(step / 2, 36, step)
    bets = np.exp(log_bets(np.exp(-s))[:, : NUM_BETS // 2] - s[:, None])
    missing = np.exp(-36 * np.array(EXPONENTS))
    assert bets.sum(axis=0) * step + missing == pytest.approx(1, abs=1e-4)


LINE = memory_store(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]), 3)


def test_mean_distance_to_the_nearest() -> None:
    queries = torch.tensor([[0.5], [4.0]])
    assert neighbor_scores(LINE, queries, 1).tolist() == [0.5, 1.0]
    assert neighbor_scores(LINE, queries, 2).tolist() == [0.5, 2.0]
    assert neighbor_scores(LINE, queries, 9) == pytest.approx([3.5 / 3, 8 / 3])


def test_mean_distance_to_the_nearest_of_the_same_label() -> None:
    queries = torch.tensor([[4.0], [4.0], [4.0], [0.0]])
    labels = torch.tensor([0, 1, 2, 1])
    assert label_scores(LINE, queries, labels, 1).tolist() == [3, 1, np.inf, 3]
    assert label_scores(LINE, queries, labels, 2).tolist() == [3.5, 1, np.inf, 3]
    none, no_labels = torch.empty(0, 1), torch.empty(0, dtype=torch.int64)
    assert label_scores(LINE, none, no_labels, 2).shape == (0,)
    assert neighbor_scores(LINE, none, 2).shape == (0,)


CENTERS = 4.0 * np.eye(8)


def draw(num_examples: int, labels: list[int], key: RandomKey) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels, each equally likely one of ``labels``."""
    rng = key.numpy()
    drawn = rng.choice(labels, size=num_examples)
    noise = rng.normal(size=(num_examples, CENTERS.shape[1]))
    embeddings = CENTERS[drawn] + noise * (drawn[:, None] + 1) / 4
    return torch.from_numpy(embeddings).float(), torch.from_numpy(drawn)


ALARM_KEY = RandomKey(11)
NEW_LABELS, KNOWN_LABELS = [4, 5], [0, 1, 2]


def by_definition(reference: Scores, scores: Scores, key: RandomKey) -> float:
    """Return R: of all starts, the products of bets to the end, meant over the bets."""
    seen, factors = list(reference), []
    for number, score in enumerate(scores.tolist(), 1):
        tie_break = ((key.child(number).entropy(8) >> 12) + 0.5) / 2**52
        seen.append(score)
        above = sum(other > score for other in seen)
        equal = sum(other == score for other in seen)
        p_value = (above + tie_break * equal) / len(seen)
        factors.append(np.exp(log_bets(np.array([p_value]))[0]))
    products = [np.prod(factors[start:], axis=0) for start in range(len(factors))]
    return float(np.sum(products, axis=0).mean())


def same(first: AlarmState, second: AlarmState) -> bool:
    return (
        np.array_equal(first.scores, second.scores)
        and first.num_scored == second.num_scored
        and np.array_equal(first.log_statistics, second.log_statistics)
        and first.alarmed_at == second.alarmed_at
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_statistic_by_its_definition(seed: int) -> None:
    scores = RandomKey(seed).numpy().integers(0, 30, size=60).astype(np.float64)
    alarm = DriftAlarm(1e6, RandomKey(seed))
    state = alarm.update(alarm.start(scores[:20]), scores[20:])
    expected = by_definition(scores[:20], scores[20:], RandomKey(seed))
    assert np.exp(log_mean(state.log_statistics)) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6), st.floats(1.5, 100.0)
)
def test_a_batch_is_its_examples(batches: list[list[int]], run_length: float) -> None:
    alarm = DriftAlarm(run_length, ALARM_KEY)
    whole = single = alarm.start(np.arange(5.0))
    for batch in batches:
        whole = alarm.update(whole, np.array(batch, np.float64))
        for score in batch:
            single = alarm.update(single, np.array([score], np.float64))
    assert same(whole, single)


def test_the_alarm_stays_at_the_example_that_set_it_off() -> None:
    alarm = DriftAlarm(50.0, ALARM_KEY)
    state = alarm.start(np.arange(200.0))
    assert state.alarmed_at is None
    alarmed = []
    for score in [1e3] * 10 + [100.0] * 200:
        state = alarm.update(state, np.array([score]))
        alarmed.append(
            (state.alarmed_at, log_mean(state.log_statistics) >= np.log(50.0))
        )
    first = [reached for _, reached in alarmed].index(True) + 1
    assert 1 < first <= 10
    assert [at for at, _ in alarmed] == [None] * (first - 1) + [first] * (211 - first)


def test_a_long_shift_does_not_overflow() -> None:
    alarm = DriftAlarm(50.0, ALARM_KEY)
    state = alarm.update(alarm.start(np.zeros(5000)), np.arange(1.0, 1001.0))
    assert 700 < log_mean(state.log_statistics) < np.inf


def test_false_alarms_are_as_rare_as_stated() -> None:
    """At most N / h of the streams of N examples alarm: here 1 in 5."""
    num_streams, length, run_length = 300, 200, 1000.0
    num_alarmed = 0
    for seed in range(num_streams):
        scores = RandomKey(seed).numpy().gamma(2.0, size=50 + length)
        alarm = DriftAlarm(run_length, RandomKey(seed, ("alarm",)))
        state = alarm.update(alarm.start(scores[:50]), scores[50:])
        num_alarmed += state.alarmed_at is not None
    assert 0 < num_alarmed <= num_streams * length / run_length


def shifted(seed: int, labels: list[int]) -> tuple[int | None, int]:
    """Return when the alarm went off, with 200 known examples and then 100 others."""
    key = RandomKey(seed)
    memory = memory_store(*draw(300, KNOWN_LABELS, key.child("stored")), 8)
    reference, _ = draw(300, KNOWN_LABELS, key.child("held-out"))
    before, _ = draw(200, KNOWN_LABELS, key.child("before"))
    after, _ = draw(100, labels, key.child("after"))
    alarm = DriftAlarm(1e5, key.child("alarm"))
    state = alarm.start(neighbor_scores(memory, reference, 5))
    state = alarm.update(state, neighbor_scores(memory, before, 5))
    state = alarm.update(state, neighbor_scores(memory, after, 5))
    return state.alarmed_at, state.num_scored


@pytest.mark.parametrize("seed", range(5))
def test_new_labels_are_seen_within_ten_examples(seed: int) -> None:
    alarmed_at, num_scored = shifted(seed, NEW_LABELS)
    assert alarmed_at is not None
    assert 200 < alarmed_at <= 210
    assert num_scored == 300


@pytest.mark.parametrize("seed", range(5))
def test_no_shift_is_not_seen(seed: int) -> None:
    assert shifted(seed, KNOWN_LABELS) == (None, 300)


def test_other_labels_of_the_same_inputs_are_seen_by_label_only() -> None:
    memory = memory_store(*draw(300, KNOWN_LABELS, ALARM_KEY.child("stored")), 8)
    reference = draw(200, KNOWN_LABELS, ALARM_KEY.child("held-out"))
    embeddings, labels = draw(100, KNOWN_LABELS, ALARM_KEY.child("after"))
    alarm = DriftAlarm(1e5, ALARM_KEY.child("alarm"))
    by_label = alarm.start(label_scores(memory, *reference, 5))
    by_input = alarm.start(neighbor_scores(memory, reference[0], 5))
    relabelled = label_scores(memory, embeddings, (labels + 1) % 3, 5)
    by_label = alarm.update(by_label, relabelled)
    by_input = alarm.update(by_input, neighbor_scores(memory, embeddings, 5))
    assert by_label.alarmed_at is not None
    assert by_label.alarmed_at <= 10
    assert by_input.alarmed_at is None


@pytest.mark.parametrize("run_length", [1.0, 0.0, np.nan, np.inf])
def test_a_run_length_of_at_most_one_is_refused(run_length: float) -> None:
    with pytest.raises(ValueError, match=r"run_length of more than 1 .* 10000 is usu"):
        DriftAlarm(run_length, ALARM_KEY)


def test_what_cannot_be_compared_is_refused() -> None:
    alarm = DriftAlarm(10.0, ALARM_KEY)
    with pytest.raises(ValueError, match="NaN at position 1; check the embeddings"):
        alarm.start(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="NaN at position 0"):
        alarm.update(alarm.start(np.ones(2)), np.array([np.nan]))
    with pytest.raises(ValueError, match=r"reference scores .*, found none; score"):
        alarm.start(np.empty(0))
    nothing = memory_store(torch.empty(0, 1), torch.empty(0, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"at least 1 example, found 0; add some"):
        neighbor_scores(nothing, torch.zeros(1, 1), 1)
