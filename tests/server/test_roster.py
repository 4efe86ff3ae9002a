import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnper.server.rounds import capped
from knnper.server.run_folder import Member, Roster

LARGEST = 2**53


@pytest.mark.parametrize(
    ("counts", "claimed", "most", "expected"),
    [
        # As much as all others together.
        ({"a": LARGEST, "b": 100, "c": 300}, "a", 0.5, {"a": 400}),
        ({"a": LARGEST, "b": 100}, "ab", 0.5, {"a": 100}),
        ({"a": 400, "b": 100, "c": 300}, "abc", 0.5, {}),
        ({"a": LARGEST, "b": 100}, "b", 0.5, {}),
        ({"a": LARGEST, "b": 100}, "ab", 1.0, {}),
        # A fifth each: w = 0.2 (w + w + 600).
        ({"a": 5000, "b": 900, "c": 600}, "ab", 0.2, {"a": 200, "b": 200}),
        # Less than the smallest is nobody's share of three.
        ({"a": 30, "b": 20, "c": 10}, "abc", 0.1, {"a": 10, "b": 10, "c": 10}),
        ({"a": 70}, "a", 0.5, {}),
        ({"a": 5, "b": 1}, "a", 0.01, {"a": 1}),
        ({}, "", 0.5, {}),
    ],
)
def test_counts_by_hand(
    counts: dict[str, int], claimed: str, most: float, expected: dict[str, int]
) -> None:
    assert capped(counts, set(claimed), most) == {**counts, **expected}


@given(
    st.lists(st.integers(1, LARGEST), min_size=2, max_size=9),
    st.sampled_from([0.25, 0.5, 0.75, 0.9]),
)
def test_no_claim_exceeds_its_share_where_that_is_possible(
    numbers: list[int], most: float
) -> None:
    counts = {str(place): number for place, number in enumerate(numbers)}
    found = capped(counts, set(counts), most)
    assert all(1 <= found[name] <= counts[name] for name in counts)
    # With one of two at a quarter there is nobody for the other half.
    if most * len(counts) >= 1:
        assert max(found.values()) <= most * sum(found.values()) * (1 + 1e-9) + 1


def test_who_trains_by_a_claim() -> None:
    members = [
        Member("a", True, 5, 0, 0, is_claim=True),
        Member("b", True, 5, 0, 0),
        Member("c", False, 5, 0, 0, is_claim=True),
    ]
    assert Roster.of(members, "x").claimed() == {"a"}
