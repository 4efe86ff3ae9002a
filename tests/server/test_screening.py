"""Which updates are like the others of their round; by hand, and in any order."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from knnper.records import fingerprint
from knnper.server import explosion, screening
from knnper.strategies.core.records import ModelUpdate

LEARNED = {"weights": screening.Norms([0.4, 0.5, 0.6], 0.5)}

MOST = 50.0


@dataclass(frozen=True)
class TwoParts:
    """An update of two models, and of something that nobody is sent."""

    models: tuple[Tensor, ...]
    control: Tensor


def measured(client: str, moved: float, sent: float = 6.0) -> screening.MeasuredUpdate:
    update = ModelUpdate(torch.full((3,), moved), 1, 0.5)
    return screening.MeasuredUpdate(
        client, update, {"weights": screening.FieldChange(moved, sent)}, 0
    )


def judge(
    norms: Sequence[float | None],
    folder: Path,
    past: Mapping[str, screening.Norms] | None = None,
    most: float | None = MOST,
    rate: float = 1.0,
    leeway: Mapping[str, float] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return who passed, and why who did not; clients are called a, b, ..."""
    refused: dict[str, str] = {}
    compared = screening.Screening(
        most, past or {}, rate, leeway or {}, folder / "waiting"
    )
    updates = [
        None if norm is None else measured(name, norm)
        for name, norm in zip("abcdefghijkl", norms, strict=False)
    ]
    passed = compared.passed(updates, len(updates), refused.__setitem__)
    return [reply.client for reply in passed], refused


@pytest.mark.parametrize("length", [0, 1, 8191, 8192, 100_003])
def test_a_norm_is_that_of_all_numbers(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    first, second = torch.randn(2, length, generator=generator)
    exact = float((first.double() - second.double()).norm())
    assert screening.norm(first, second) == pytest.approx(exact, rel=1e-6)
    assert screening.norm(first) == pytest.approx(
        float(first.double().norm()), rel=1e-6
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_norm_of_what_is_no_number_is_none_either(value: float) -> None:
    numbers = torch.zeros(9000)
    numbers[8500] = value
    assert not math.isfinite(screening.norm(numbers))
    assert not math.isfinite(screening.norm(numbers, torch.zeros(9000)))


def test_change_of_a_field_that_was_not_sent_is_its_length() -> None:
    sent = {"models/0": torch.tensor([3.0, 4.0]), "control": torch.zeros(2)}
    arrived = {
        "models/0": torch.tensor([3.0, 5.0]),
        "models/1": torch.tensor([2.0, 0.0]),
        "control": torch.tensor([6.0]),  # of another shape
        "loss": torch.tensor(-7.0),
    }
    norms = {"models/0": 5.0, "control": 0.0}
    assert screening.changes_of(arrived, sent, norms) == {
        "models": screening.FieldChange(math.hypot(1.0, 2.0), 5.0),
        "control": screening.FieldChange(6.0, 0.0),
        "loss": screening.FieldChange(7.0, 0.0),
    }


@pytest.mark.parametrize("past", [{}, LEARNED])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_update_scaled_by_900_among_three_is_refused(
    tmp_path: Path, past: Mapping[str, screening.Norms], place: int
) -> None:
    norms = [0.3, 0.4, 0.5]
    norms[place] *= 900
    passed, refused = judge(norms, tmp_path, past)
    assert list(refused) == ["abc"[place]]
    assert "max_update_median_ratio" in refused["abc"[place]]
    assert passed == [client for client in "abc" if client not in refused]


def test_the_order_of_replies_decides_nothing(tmp_path: Path) -> None:
    """Less than half are bad, whoever comes first; the others keep their order."""
    honest, bad = [0.02, 0.3, 0.5], [90.0, 400.0]
    for norms in itertools.permutations([*honest, *bad]):
        passed, refused = judge(norms, tmp_path)
        assert sorted(norms["abcde".index(client)] for client in refused) == bad
        assert passed == [client for client in "abcde" if client not in refused]


@pytest.mark.parametrize("past", [{}, LEARNED])
def test_clients_that_differ_are_all_taken(
    tmp_path: Path, past: Mapping[str, screening.Norms]
) -> None:
    # What was seen in training: from nothing at all to 25 times the median.
    passed, refused = judge([12.0, 0.0, 0.5, 0.4, 1.0, 0.003], tmp_path, past)
    assert (len(passed), refused) == (6, {})


@pytest.mark.parametrize("norms", [[300.0], [300.0, 300.0], [9000.0, 0.0]])
def test_fewer_than_three_are_judged_by_the_rounds_before(
    tmp_path: Path, norms: list[float]
) -> None:
    large = ["ab"[place] for place, norm in enumerate(norms) if norm]
    assert list(judge(norms, tmp_path, LEARNED)[1]) == large
    assert judge([0.2] * len(norms), tmp_path, LEARNED)[1] == {}


def test_without_rounds_before_one_alone_is_taken(tmp_path: Path) -> None:
    assert judge([300.0], tmp_path)[1] == {}
    assert judge([300.0, None], tmp_path)[1] == {}
    # One of two may move the model by its length.
    assert judge([0.0, 6.9], tmp_path)[1] == {}
    assert list(judge([0.0, 7.1], tmp_path)[1]) == ["b"]


def test_where_most_have_learned_the_others_may_still_learn(tmp_path: Path) -> None:
    fitted = {"weights": screening.Norms([1e-6] * 5, 0.5)}
    norms = [0.7, 1e-6, 1e-6, 0.0, 2e-6]
    assert judge(norms, tmp_path, fitted)[1] == {}
    assert list(judge([0.7 * 900, *norms[1:]], tmp_path, fitted)[1]) == ["a"]


def test_the_largest_median_falls_with_the_learning_rate(tmp_path: Path) -> None:
    norms = [4.9, 1e-6, 1e-6, 0.0, 2e-6]
    fitted = {"weights": screening.Norms([1e-6] * 5, 0.5)}
    assert judge(norms, tmp_path, fitted)[1] == {}
    assert list(judge(norms, tmp_path, fitted, rate=0.1)[1]) == ["a"]


def test_a_loss_may_be_far_above_the_others(tmp_path: Path) -> None:
    updates = [
        replace(
            measured(client, loss), changes={"loss": screening.FieldChange(loss, 0.0)}
        )
        for client, loss in (("a", 1e-4), ("b", 4.0), ("c", 1e-5), ("d", 51.0))
    ]
    refused: dict[str, str] = {}
    compared = screening.Screening(MOST, {}, 1.0, {}, tmp_path / "waiting")
    list(compared.passed(updates, 4, refused.__setitem__))
    assert list(refused) == ["d"]


def test_client_with_more_known_data_may_move_farther(tmp_path: Path) -> None:
    norms = [0.5, 0.5, 40.0]
    assert list(judge(norms, tmp_path)[1]) == ["c"]
    assert judge(norms, tmp_path, leeway={"c": 2.0})[1] == {}


def test_any_norm_is_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    assert judge([0.1, 0.1, 1e9], tmp_path, most=None)[1] == {}


@pytest.mark.parametrize("past", [{}, LEARNED])
def test_ordinary_updates_do_not_wait_for_the_others(
    tmp_path: Path, past: Mapping[str, screening.Norms]
) -> None:
    pulled: list[str] = []

    def updates() -> Iterator[screening.MeasuredUpdate]:
        for client in "abc":
            pulled.append(client)
            yield measured(client, 0.4)

    compared = screening.Screening(MOST, past, 1.0, {}, tmp_path / "waiting")
    passed = compared.passed(updates(), 3, lambda *_: None)
    assert [(next(passed).client, len(pulled)) for _ in "abc"] == [
        *(("a", 1), ("b", 2), ("c", 3))
    ]


def test_updates_behind_a_suspicious_update_wait_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "MOST_WAITING_BYTES", 20)
    on_disk: list[int] = []
    sent = [measured("a", 90.0), *(measured(client, 0.25) for client in "bcdef")]

    def updates() -> Iterator[screening.MeasuredUpdate]:
        for reply in sent:
            yield reply
            on_disk.append(len(list((tmp_path / "waiting").glob("*.f32"))))

    compared = screening.Screening(MOST, {}, 1.0, {}, tmp_path / "waiting")
    passed = list(compared.passed(updates(), 6, lambda *_: None))
    # The verdict on the first is certain once four of the six are known.
    assert on_disk == [0, 1, 2, 0, 0, 0]
    assert [reply.client for reply in passed] == list("bcdef")
    assert fingerprint(passed[1].update) == fingerprint(sent[2].update)
    assert not (tmp_path / "waiting").exists()


def test_usual_norm_is_the_lower_median_of_earlier_medians() -> None:
    norms = screening.Norms()
    for median in (0.1, 0.4, 9.0, 0.4, 0.3, 0.2):
        norms = norms.after(median)
    # By hand: the lower medians of up to five are 0.1, 0.1, 0.4, 0.4, 0.4, 0.4.
    assert norms == screening.Norms([0.4, 9.0, 0.4, 0.3, 0.2], 0.4)
    assert norms.usual() == 0.4


def test_medians_are_of_what_was_passed_on_at_a_rate_of_1(tmp_path: Path) -> None:
    compared = screening.Screening(MOST, {}, 0.5, {}, tmp_path / "waiting")
    updates = [measured("a", 0.2), measured("b", 0.4), measured("c", 700.0)]
    list(compared.passed(updates, 3, lambda *_: None))
    assert compared.norms() == {"weights": screening.Norms([0.4], 0.4)}
    assert compared.distances() == {"weights": pytest.approx(0.2 / 7)}


def clip(
    folder: Path,
    norms: Sequence[float],
    past: Mapping[str, screening.Norms] | None = None,
    most: float = 2.0,
    leeway: Mapping[str, float] | None = None,
    sent: float = 6.0,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by client how far its weights moved in the end, and who was shortened."""
    origin = {"weights": torch.full((3,), 5.0)}

    def updates() -> Iterator[screening.MeasuredUpdate]:
        for client, moved in zip("abcdefgh", norms, strict=False):
            update = ModelUpdate(origin["weights"] + moved, 1, 0.5)
            change = screening.FieldChange(moved, sent)
            yield screening.MeasuredUpdate(client, update, {"weights": change}, 0)

    clipping = screening.Clipping(most, lambda *_: origin)
    compared = screening.Screening(
        MOST, past or {}, 1.0, leeway or {}, folder / "waiting", clipping
    )
    passed = list(compared.passed(updates(), len(norms), lambda *_: None))
    moved = {reply.client: float(reply.update.weights[0]) - 5.0 for reply in passed}
    return moved, compared.clipped


def test_update_is_clipped_to_twice_the_median(tmp_path: Path) -> None:
    moved, clipped = clip(tmp_path, [0.5, 8.0, 1.0, 0.9, 1.1])
    # The median is 1.0.
    assert moved == pytest.approx({"a": 0.5, "b": 2.0, "c": 1.0, "d": 0.9, "e": 1.1})
    assert clipped == pytest.approx({"b": 4.0})


def test_clipping_does_not_depend_on_the_order_of_replies(tmp_path: Path) -> None:
    norms = [0.4, 0.9, 1.0, 3.5, 30.0]
    for order in itertools.permutations(norms):
        moved, _ = clip(tmp_path, order)
        in_order = [moved["abcde"[order.index(norm)]] for norm in norms]
        assert in_order == pytest.approx([0.4, 0.9, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("norms", "past", "expected"),
    [
        # The median of this round and the last ones is 0.4, of the last ones 0.5.
        ([0.1, 0.2, 9.0], LEARNED, [0.1, 0.2, 1.0]),
        ([9.0], LEARNED, [1.0]),
        # Only the largest median was ever far above the present ones.
        (
            [1.0, 3.0, 1.0, 1.0],
            {"weights": screening.Norms([1.0] * 5, 90.0)},
            [1.0, 2.0, 1.0, 1.0],
        ),
        # Where nobody else moves, there is nothing to compare with.
        ([0.0, 0.5, 0.0], {}, [0.0, 0.5, 0.0]),
    ],
)
def test_clipping_limit_follows_this_and_recent_rounds(
    tmp_path: Path,
    norms: list[float],
    past: Mapping[str, screening.Norms],
    expected: list[float],
) -> None:
    moved, _ = clip(tmp_path, norms, past)
    assert list(moved.values()) == pytest.approx(expected)


def test_clipping_has_regard_to_leeway(tmp_path: Path) -> None:
    moved, clipped = clip(tmp_path, [1.0, 1.0, 9.0], leeway={"c": 3.0, "a": 0.25})
    assert list(moved.values()) == pytest.approx([0.5, 1.0, 6.0])
    assert clipped == pytest.approx({"a": 2.0, "c": 1.5})


def test_field_that_was_not_sent_is_not_clipped(tmp_path: Path) -> None:
    moved, clipped = clip(tmp_path, [1.0, 1.0, 9.0], sent=0.0)
    assert list(moved.values()) == pytest.approx([1.0, 1.0, 9.0])
    assert clipped == {}


def test_clipped_update_keeps_what_was_not_sent() -> None:
    control = torch.tensor([7.0])
    origin = {"models/0": torch.tensor([1.0, 1.0])}
    update = TwoParts((torch.tensor([3.0, 5.0]), torch.tensor([9.0])), control)
    measured = screening.MeasuredUpdate("a", update, {}, 0)
    clipping = screening.Clipping(2.0, lambda *_: origin)
    shortened = clipping.shorten(measured, {"models": 0.5, "control": 0.5}).update
    assert [model.tolist() for model in shortened.models] == [[2.0, 3.0], [9.0]]
    assert shortened.control.tolist() == [7.0]


@pytest.mark.parametrize("past", [{}, LEARNED])
def test_only_what_may_be_clipped_waits_for_the_whole_round(
    tmp_path: Path, past: Mapping[str, screening.Norms]
) -> None:
    pulled: list[str] = []

    def updates() -> Iterator[screening.MeasuredUpdate]:
        for client, moved in zip("abcde", (0.5, 0.5, 0.5, 4.0, 0.5), strict=True):
            pulled.append(client)
            yield measured(client, moved)

    clipping = screening.Clipping(2.0, lambda *_: {})
    folder = tmp_path / "waiting"
    compared = screening.Screening(MOST, past, 1.0, {}, folder, clipping)
    passed = compared.passed(updates(), 5, lambda *_: None)
    progress = [(next(passed).client, len(pulled)) for _ in "abcde"]
    # Without rounds before, the median is known once most of the round is.
    first = [1, 2, 3] if past else [3, 3, 3]
    assert progress == [*zip("abc", first, strict=True), ("d", 5), ("e", 5)]


def round_of(folder: Path, *moved: float, sent: float = 3.0) -> screening.Screening:
    """Return the screening of a round whose clients moved the weights so far."""
    round_screening = screening.Screening(None, {}, 1.0, {}, folder / "waiting")
    update = ModelUpdate(torch.zeros(1), 1, 0.5)
    updates = [
        screening.MeasuredUpdate(
            "a", update, {"weights": screening.FieldChange(m, sent)}, 0
        )
        for m in moved
    ]
    list(round_screening.passed(updates, len(updates), lambda *_: None))
    return round_screening


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], None),
        ([math.nan], None),
        ([math.nan, 0.3], 0.3),
        ([0.1, 1e99, 0.2], 0.2),
        ([0.1, math.inf, 1e101], math.inf),
        ([-5.0, -3.0], -5.0),
    ],
)
def test_median_loss_resists_one_client(
    losses: list[float], expected: float | None
) -> None:
    assert explosion.median_loss(losses) == expected


@pytest.mark.parametrize(
    ("loss", "lowest", "explodes"),
    [
        (2.3, None, False),
        (math.inf, None, True),
        (None, 0.4, False),
        (20.4, 0.4, False),  # 0.4 + 20
        (20.5, 0.4, True),
        (1.0, 1e-6, False),  # a client that nobody has learned from
        (105.0, 5.0, False),  # 5 + 20 * 5
        (105.1, 5.0, True),
        (8_000.0, -400.0, True),  # -400 + 20 * 400 = 7,600
        (7_000.0, -400.0, False),
        (math.inf, 0.4, True),
    ],
)
def test_how_far_a_loss_may_rise(
    tmp_path: Path, loss: float | None, lowest: float | None, explodes: bool
) -> None:
    sign = explosion.explosion_sign(loss, lowest, round_of(tmp_path, 0.1).distances())
    assert bool(sign) == explodes


@pytest.mark.parametrize(
    ("moved", "sent", "explodes"),
    [
        ((0.5, 9.0, 9.0), 3.0, True),  # 9 > 2 * (3 + 1)
        ((0.5, 7.9, 99.0), 3.0, False),
        ((0.5, 0.6, 1e9), 3.0, False),  # one client
        ((9.0, 9.0), 0.0, False),  # a loss is sent by nobody
    ],
)
def test_how_far_the_median_client_may_move(
    tmp_path: Path, moved: tuple[float, ...], sent: float, explodes: bool
) -> None:
    sign = explosion.explosion_sign(
        0.5, 0.4, round_of(tmp_path, *moved, sent=sent).distances()
    )
    assert ("weights" in sign) == explodes
