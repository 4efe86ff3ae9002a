import csv
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from knnper.server.distribution import in_groups
from knnper.server.plausibility import evaluation_problem, result_problem
from knnper.server.result_files import write_clients_csv
from knnper.server.results import Total, summarise, summarise_groups, training_summary
from knnper.server.run import scalar_writer
from knnper.strategies.core.evaluation import (
    NUM_CALIBRATION_BINS,
    ClientResult,
    Evaluation,
)


def evaluation(
    num_examples: int, num_correct: int, *, confidence: float = 0.5, loss: float = 1.0
) -> Evaluation:
    """Return an evaluation with one confidence and one loss for all examples."""
    bins = [0] * NUM_CALIBRATION_BINS
    position = int(confidence * NUM_CALIBRATION_BINS)
    counts, correct = bins.copy(), bins.copy()
    sums = [0.0] * NUM_CALIBRATION_BINS
    counts[position], correct[position] = num_examples, num_correct
    sums[position] = num_examples * confidence
    return Evaluation(
        num_examples,
        num_correct,
        num_examples * loss,
        tuple(counts),
        tuple(sums),
        tuple(correct),
    )


def client(
    name: str,
    personal: Evaluation,
    reference: Evaluation | None = None,
    *,
    seen: bool = True,
    chosen: dict[str, float] | None = None,
) -> ClientResult:
    return ClientResult(
        client=name,
        seen=seen,
        num_train=9,
        num_validation=4,
        personal=personal,
        reference=personal if reference is None else reference,
        validation=evaluation(4, 3),
        chosen=chosen or {},
    )


def test_hand_computed_group() -> None:
    group = summarise(
        [
            client("a", evaluation(10, 9, loss=0.5), evaluation(10, 5)),
            client("b", evaluation(30, 15), evaluation(30, 18, confidence=0.7)),
            client("c", evaluation(0, 0)),
        ]
    )
    personal = group.personal
    assert (personal.num_clients, personal.num_empty) == (3, 1)
    assert personal.num_test_examples == 40
    assert personal.accuracy_weighted == 24 / 40
    assert personal.accuracy_mean == pytest.approx(0.7)
    assert personal.accuracy_worst == 0.5
    assert personal.accuracy_std == pytest.approx(0.2)
    assert personal.fraction_degraded == 0.5
    assert personal.log_loss == pytest.approx((10 * 0.5 + 30 * 1.0) / 40)
    # One bin holds all 40 with confidence 0.5 and accuracy 0.6.
    assert personal.ece == pytest.approx(0.1)
    assert group.reference.accuracy_weighted == 23 / 40
    assert group.reference.fraction_degraded == 0.0
    # Two bins: |0.5 - 0.5| of 10, |0.6 - 0.7| of 30.
    assert group.reference.ece == pytest.approx(0.1 * 30 / 40)


def weighted(num_examples: int, total: float, correct: float) -> Evaluation:
    """Return an evaluation with half of the examples right, and given weights."""
    half = evaluation(num_examples, num_examples // 2)
    return dataclasses.replace(half, weight_sum=total, weight_correct=correct)


def test_hand_computed_group_whose_labels_count_differently() -> None:
    group = summarise(
        [
            client("a", weighted(10, 2.0, 1.8), weighted(10, 2.0, 1.0)),
            client("b", weighted(30, 3.0, 1.5), weighted(30, 3.0, 1.8)),
            client("c", weighted(30, 0.0, 0.0)),
        ]
    )
    personal = group.personal
    assert (personal.num_clients, personal.num_empty) == (3, 1)
    assert personal.num_test_examples == 40
    assert personal.accuracy_weighted == pytest.approx((10 * 0.9 + 30 * 0.5) / 40)
    assert personal.accuracy_mean == pytest.approx(0.7)
    assert personal.accuracy_worst == 0.5
    assert personal.accuracy_std == pytest.approx(0.2)
    assert personal.fraction_degraded == 0.5
    assert group.reference.accuracy_weighted == pytest.approx((5 + 30 * 0.6) / 40)
    # These count all examples alike.
    assert personal.log_loss == 1.0
    assert personal.ece == pytest.approx(0.0)


def test_bins_are_pooled_before_the_gap_is_taken() -> None:
    over = client("a", evaluation(10, 0))
    under = client("b", evaluation(10, 10))
    assert summarise([over]).personal.ece == pytest.approx(0.5)
    assert summarise([over, under]).personal.ece == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("num_clients", "rank"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (95, 9)]
)
def test_bottom_decile_is_an_element_of_the_list(num_clients: int, rank: int) -> None:
    clients = [
        client(f"c{number}", evaluation(100, number))
        for number in reversed(range(num_clients))
    ]
    assert summarise(clients).personal.accuracy_bottom_decile == (rank - 1) / 100


@pytest.mark.parametrize("clients", [[], [client("a", evaluation(0, 0))]])
def test_no_test_examples(clients: list[ClientResult]) -> None:
    document = summarise(clients).as_document()
    for figures in (document, document["global"]):
        counts = [figures.pop(name) for name in ("num_clients", "num_empty")]
        assert counts == [len(clients)] * 2
        assert figures.pop("num_test_examples") == 0
        figures.pop("global", None)
        assert set(figures.values()) == {None}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.floats(0, 1), st.floats(0, 0.99)), min_size=1
    )
)
def test_relations_between_the_figures(drawn: list[tuple[int, float, float]]) -> None:
    clients = [
        client(f"c{i}", evaluation(n, int(share * n), confidence=confidence))
        for i, (n, share, confidence) in enumerate(drawn)
    ]
    figures = summarise(clients).personal
    assert figures == summarise(clients).reference
    assert figures.accuracy_worst is not None
    assert figures.accuracy_bottom_decile is not None
    assert figures.accuracy_mean is not None
    assert figures.ece is not None
    assert figures.accuracy_worst <= figures.accuracy_bottom_decile
    assert figures.accuracy_worst <= figures.accuracy_mean + 1e-12
    assert 0 <= figures.ece <= 1
    order_reversed = summarise(clients[::-1]).personal
    assert order_reversed.accuracy_mean == figures.accuracy_mean
    assert order_reversed.log_loss == figures.log_loss
    assert order_reversed.ece == figures.ece


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_sums_of_sums_are_the_sum(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knnper.server.results.MOST_SUMMED", most)
    numbers, total = [0.1 * number for number in range(50)], Total()
    for number in numbers:
        total.add(number)
    assert total.value == pytest.approx(math.fsum(numbers), rel=1e-14)
    if most == 100:
        assert total.value == math.fsum(numbers)


def test_groups_are_apart() -> None:
    seen = client("a", evaluation(10, 9))
    unseen = client("b", evaluation(10, 4), seen=False)
    document = summarise_groups([unseen, seen])
    assert list(document) == ["seen", "unseen"]
    assert document["seen"]["accuracy_weighted"] == 0.9
    assert document["unseen"]["accuracy_weighted"] == 0.4
    assert document["unseen"]["global"]["num_clients"] == 1


def test_training_summary() -> None:
    rounds = [
        {"server_round": 1, "train_loss": 2.0, "seconds": 1.5, "bytes_up": 10},
        {"server_round": 2, "train_loss": 1.0, "seconds": 0.5, "bytes_up": 10},
    ]
    clients = [client("a", evaluation(1, 1)), client("b", evaluation(1, 1), seen=False)]
    assert training_summary(rounds, clients) == {
        "num_rounds": 2,
        "train_loss": 1.0,
        "seconds": 2.0,
        "bytes_up": 20,
        "bytes_down": 0,
        "num_failed": 0,
        "validation": {"accuracy_weighted": 0.75},
    }
    nothing = training_summary([], [])
    assert nothing["train_loss"] is None
    assert nothing["validation"] == {"accuracy_weighted": None}


def test_clients_csv(tmp_path: Path) -> None:
    results = [
        client("a", evaluation(0, 0), seen=False, chosen={"knn_weight": 0.30000000001}),
        client("b", evaluation(3, 1), chosen={"knn_weight": 0.1, "kernel_scale": 1}),
        client("c", evaluation(4, 4, loss=math.log(2)), evaluation(4, 3)),
    ]
    path = tmp_path / "clients.csv"
    write_clients_csv(path, results)
    assert path.read_text().splitlines() == [
        "client,seen,num_train,num_validation,num_test,accuracy,accuracy_global,"
        "log_loss,log_loss_global,kernel_scale,knn_weight",
        "a,false,9,4,0,,,,,,0.30000000001",
        "b,true,9,4,3,0.3333333333333333,0.3333333333333333,1.0,1.0,1.0,0.1",
        "c,true,9,4,4,1.0,0.75,0.6931471805599453,1.0,,",
    ]


GOOD = evaluation(4, 3, confidence=0.0, loss=0.0)
RESULT = ClientResult("a", True, 5, 1, GOOD, GOOD, GOOD, {"knn_weight": 0.5})
BINS = GOOD.bin_counts
WEIGHTED = dataclasses.replace(GOOD, weight_sum=0.5, weight_correct=0.5)


@pytest.mark.parametrize("good", [GOOD, WEIGHTED, Evaluation(0, 0, 0.0, (), (), ())])
def test_plausible_evaluation_is_accepted(good: Evaluation) -> None:
    assert evaluation_problem(good) is None
    assert result_problem(RESULT) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"num_correct": 99},
        {"num_correct": -1},
        {"num_examples": 5},
        {"num_examples": 10**400},
        {"num_examples": "4"},
        {"log_loss_sum": float("nan")},
        {"log_loss_sum": -1.0},
        {"log_loss_sum": 111.0},
        {"log_loss_sum": "x"},
        {"bin_counts": ()},
        {"bin_counts": (5, -1, *BINS[2:])},
        {"bin_correct": (4, *BINS[1:])},
        {"bin_confidence": (float("inf"), *(0.0,) * 14)},
        {"bin_confidence": (5.0, *(0.0,) * 14)},
        {"weight_sum": 1.0},
        {"weight_correct": 1.0},
        {"weight_sum": 1.0, "weight_correct": 2.0},
        {"weight_sum": 1.0, "weight_correct": -0.5},
        {"weight_sum": -0.0005, "weight_correct": -0.0005},
        {"weight_sum": float("inf"), "weight_correct": float("inf")},
        {"weight_sum": 1.0, "weight_correct": float("nan")},
        {"weight_sum": 1.0, "weight_correct": "x"},
    ],
)
def test_implausible_evaluation_is_refused(changed: dict[str, Any]) -> None:
    wrong = dataclasses.replace(GOOD, **changed)
    assert evaluation_problem(wrong)
    assert result_problem(dataclasses.replace(RESULT, reference=wrong))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_train": -1},
        {"num_validation": True},
        {"chosen": {"k": float("nan")}},
        {"chosen": {"k\n": 1.0}},
        {"chosen": {"k" * 65: 1.0}},
        {"chosen": {f"k{number}": 1.0 for number in range(65)}},
    ],
)
def test_reports_that_cannot_be_true_are_refused(changed: dict[str, Any]) -> None:
    assert result_problem(dataclasses.replace(RESULT, **changed))


def test_no_more_can_be_right_than_there_are() -> None:
    assert "at most 3" in str(evaluation_problem(GOOD, 3))
    assert evaluation_problem(None) == "expected an Evaluation, found a NoneType"


SIZES = st.dictionaries(st.text("abcd", min_size=1, max_size=3), st.integers(0, 50))


def test_groups_by_hand() -> None:
    # 60 images make two groups of 30: the middles are at 10, 25, 35, 50.
    sizes = {"a": 20, "b": 10, "c": 10, "d": 20}
    assert list(in_groups(sizes, at_once=40)) == [("a", "b"), ("c", "d")]
    assert list(in_groups(sizes, at_once=60)) == [("a", "b", "c", "d")]
    assert list(in_groups(sizes, at_once=1)) == [("a",), ("b",), ("c",), ("d",)]


@settings(deadline=None)
@given(SIZES, st.integers(1, 100))
def test_everyone_is_in_one_group_in_order(sizes: dict[str, int], at_once: int) -> None:
    groups = list(in_groups(sizes, at_once))
    assert list(itertools.chain.from_iterable(groups)) == list(sizes)
    assert all(groups)


@settings(deadline=None)
@given(SIZES, st.integers(1, 100))
def test_no_group_is_larger_than_asked_by_more_than_a_client(
    sizes: dict[str, int], at_once: int
) -> None:
    groups = list(in_groups(sizes, at_once))
    assert bool(groups) == bool(sizes)
    for group in groups:
        total = sum(sizes[client] for client in group)
        assert total <= at_once + max(sizes[client] for client in group)


def test_a_resumed_curve_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    with scalar_writer(tmp_path, first_round=1) as write:
        for server_round in (1, 2, 3):
            write({"server_round": server_round, "train_loss": float(server_round)})
    with scalar_writer(tmp_path, first_round=2) as write:
        write({"server_round": 2, "train_loss": 20.0, "num_failed": 1})
    curves = EventAccumulator(str(tmp_path))
    curves.Reload()
    assert sorted(curves.Tags()["scalars"]) == ["num_failed", "train_loss"]
    losses = [(event.step, event.value) for event in curves.Scalars("train_loss")]
    assert losses == [(1, 1.0), (2, 20.0)]


def test_names_with_commas_stay_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    write_clients_csv(path, [client('site "1", north', evaluation(2, 1))])
    with path.open(newline="") as file:
        assert next(csv.DictReader(file))["client"] == 'site "1", north'
