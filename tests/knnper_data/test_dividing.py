from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.data.dividing import (
    DividingSettings,
    FractionSettings,
    mark_tested,
    split_by_name,
)
from knnper.data.site_data import place_of


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(0, 0.2, 0), (1, 0.9, 0), (2, 0.2, 0), (2, 0.99, 1), (3, 0.2, 1), (10, 0.99, 9)],
)
@pytest.mark.parametrize("split", ["random", "time"])
def test_how_many_are_tested_on(
    count: int, fraction: float, expected: int, split: str
) -> None:
    chosen = DividingSettings(test_fraction=fraction, split=split)  # type: ignore[arg-type]
    mask = mark_tested(count, "someone", chosen)
    assert (mask.shape, mask.sum()) == ((count,), expected)


def test_the_choice_depends_on_seed_and_user_alone() -> None:
    mask = mark_tested(5, "someone", DividingSettings(test_fraction=0.4, split="time"))
    assert mask.tolist() == [False, False, False, True, True]
    first = mark_tested(50, "someone", DividingSettings())
    np.testing.assert_array_equal(mark_tested(50, "someone", DividingSettings()), first)
    assert (mark_tested(50, "another", DividingSettings()) != first).any()
    assert (mark_tested(50, "someone", DividingSettings(seed=1)) != first).any()


NAMES = st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=40)
HALVES = FractionSettings(validation=0.3, test=0.3)


def by_name(names: list[str], fractions: FractionSettings = HALVES) -> dict[str, str]:
    return dict(zip(names, split_by_name(names, fractions), strict=True))


@settings(max_examples=40, deadline=None)
@given(NAMES, st.data())
def test_an_example_stays_where_it_is(names: list[str], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    before, after = by_name(some), by_name(names)
    moved = [name for name in some if before[name] != after[name]]
    # One is trained on for want of others: it may move once there are some.
    assert len(moved) <= 1
    if moved:
        assert list(before.values()).count("train") == 1


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(0, 3))
def test_something_is_left_to_train_on(names: list[str], seed: int) -> None:
    assert "train" in split_by_name(names, FractionSettings(0.49, 0.5, seed))


def test_the_fractions_are_met_on_average() -> None:
    splits = split_by_name([f"{n}.png" for n in range(20_000)], FractionSettings())
    # Five standard deviations of a binomial count.
    assert abs(splits.count("validation") - 4000) < 5 * (20_000 * 0.2 * 0.8) ** 0.5
    assert abs(splits.count("test") - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5


def test_known_splits() -> None:
    # Fixed for good: a site's test data must stay its test data in later versions.
    expected = "train validation validation train validation test"
    names = [f"{letter}.png" for letter in "abcdef"]
    assert split_by_name(names, HALVES) == expected.split()


def test_seeds_and_fractions_at_their_limits() -> None:
    names = [str(number) for number in range(100)]
    other = FractionSettings(0.3, 0.3, seed=1)
    assert split_by_name(names, HALVES) != split_by_name(names, other)
    assert set(split_by_name(names, FractionSettings(0.0, 0.0))) == {"train"}
    assert split_by_name([], HALVES) == []
    with pytest.raises(ValueError, match="leaves no training data"):
        FractionSettings(validation=0.5, test=0.5)


def test_a_way_back_is_left_out_but_from_behind_a_link(tmp_path: Path) -> None:
    base = tmp_path / "clients" / "cats"
    assert place_of(base, "../../shares/cat.npz") == tmp_path / "shares/cat.npz"
    assert place_of(base, "own.npz") == base / "own.npz"
    assert place_of(base, str(tmp_path / "own.npz")) == tmp_path / "own.npz"
    (tmp_path / "disk" / "cats").mkdir(parents=True)
    base = tmp_path / "cats"
    base.symlink_to(tmp_path / "disk" / "cats")
    (tmp_path / "disk" / "own.npz").touch()
    assert place_of(base, "../own.npz").is_file()
