"""The statistic by its definition, its false alarms, and how soon it sees a shift."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.seeding import RandomKey
from papers.drift_alarm import (
    AlarmState,
    DriftAlarm,
    Scores,
    label_scores,
    log_bets,
    neighbor_scores,
)
from tests.papers.clusters import ListedMemory, draw

KEY = RandomKey(11)
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


def test_one_example_by_hand() -> None:
    alarm = DriftAlarm(100.0, KEY)
    tie_break = ((KEY.child(1).entropy(8) >> 12) + 0.5) / 2**52
    p = tie_break / 4

    state = alarm.update(alarm.start(np.array([3.0, 1.0, 2.0])), np.array([9.0]))

    exponents = (0.2, 0.4, 0.6, 0.8)
    bets = [e * q ** (e - 1) for q in (p, 1 - p) for e in exponents]
    assert np.exp(state.log_statistic) == pytest.approx(sum(bets) / 8)
    assert state.scores.tolist() == [1, 2, 3, 9]
    assert state.num_scored == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_statistic_by_its_definition(seed: int) -> None:
    scores = RandomKey(seed).numpy().integers(0, 30, size=60).astype(np.float64)
    alarm = DriftAlarm(1e6, RandomKey(seed))

    state = alarm.update(alarm.start(scores[:20]), scores[20:])

    expected = by_definition(scores[:20], scores[20:], RandomKey(seed))
    assert np.exp(state.log_statistic) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6),
    st.floats(1.5, 100.0),
)
def test_a_batch_is_its_examples_one_by_one(
    batches: list[list[int]], run_length: float
) -> None:
    alarm = DriftAlarm(run_length, KEY)
    whole = single = alarm.start(np.arange(5.0))
    for batch in batches:
        whole = alarm.update(whole, np.array(batch, np.float64))
        for score in batch:
            single = alarm.update(single, np.array([score], np.float64))

    assert same(whole, single)


def test_the_alarm_stays_at_the_example_that_set_it_off() -> None:
    alarm = DriftAlarm(50.0, KEY)
    state = alarm.start(np.arange(200.0))
    assert state.alarmed_at is None
    alarmed = []
    for score in [1e3] * 10 + [100.0] * 200:
        state = alarm.update(state, np.array([score]))
        alarmed.append((state.alarmed_at, state.log_statistic >= np.log(50.0)))

    first = [reached for _, reached in alarmed].index(True) + 1
    assert 1 < first <= 10
    assert [at for at, _ in alarmed] == [None] * (first - 1) + [first] * (211 - first)


def test_a_long_shift_does_not_overflow() -> None:
    alarm = DriftAlarm(50.0, KEY)

    state = alarm.update(alarm.start(np.zeros(5000)), np.arange(1.0, 1001.0))

    assert 700 < state.log_statistic < np.inf


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


def test_as_many_examples_as_stated_come_before_a_false_alarm() -> None:
    run_length, lengths = 30.0, []
    for seed in range(200):
        scores = RandomKey(seed).numpy().normal(size=1020)
        alarm = DriftAlarm(run_length, RandomKey(seed, ("alarm",)))
        state = alarm.update(alarm.start(scores[:20]), scores[20:])
        lengths.append(state.alarmed_at or 1000)

    assert run_length <= np.mean(lengths) < 8 * run_length


def shifted(seed: int, labels: list[int]) -> tuple[int | None, int]:
    """Return when the alarm went off, with 200 known examples and then 100 others."""
    key = RandomKey(seed)
    memory = ListedMemory(*draw(300, KNOWN_LABELS, key.child("stored")))
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


def test_a_narrowing_to_the_densest_label_is_seen() -> None:
    """p-values become uniform in [2/3, 1], where the best bet's log grows by 0.34."""
    alarms = [shifted(seed, [0])[0] for seed in range(20)]

    delays = [(alarmed_at or 1000) - 200 for alarmed_at in alarms]
    assert min(delays) > 0
    assert 25 <= np.median(delays) <= 50


@pytest.mark.parametrize("seed", range(5))
def test_no_shift_is_not_seen(seed: int) -> None:
    assert shifted(seed, KNOWN_LABELS) == (None, 300)


def test_other_labels_of_the_same_inputs_are_seen_by_label_only() -> None:
    memory = ListedMemory(*draw(300, KNOWN_LABELS, KEY.child("stored")))
    reference = draw(200, KNOWN_LABELS, KEY.child("held-out"))
    embeddings, labels = draw(100, KNOWN_LABELS, KEY.child("after"))
    alarm = DriftAlarm(1e5, KEY.child("alarm"))
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
        DriftAlarm(run_length, KEY)


def test_no_reference_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"reference scores .*, found none; score held"
    ):
        DriftAlarm(10.0, KEY).start(np.empty(0))


def test_scores_that_are_no_numbers_are_refused() -> None:
    alarm = DriftAlarm(10.0, KEY)
    with pytest.raises(ValueError, match="NaN at position 1; check the embeddings"):
        alarm.start(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="NaN at position 0"):
        alarm.update(alarm.start(np.ones(2)), np.array([np.nan]))
