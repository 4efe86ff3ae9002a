"""Clients that are served together."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.server.results import in_groups

SIZES = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 50))


def test_groups_by_hand() -> None:
    # 60 images make two groups of 30: the middles are at 10, 25, 35, 50.
    sizes = {"a": 20, "b": 10, "c": 10, "d": 20}
    assert list(in_groups(sizes, at_once=40)) == [("a", "b"), ("c", "d")]
    assert list(in_groups(sizes, at_once=60)) == [("a", "b", "c", "d")]
    assert list(in_groups(sizes, at_once=1)) == [("a",), ("b",), ("c",), ("d",)]


def test_nobody_makes_no_group() -> None:
    assert list(in_groups({})) == []


def test_clients_without_images_are_served_too() -> None:
    assert list(in_groups({"a": 0, "b": 0})) == [("a", "b")]


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
    for group in in_groups(sizes, at_once):
        total = sum(sizes[client] for client in group)
        assert total <= at_once + max(sizes[client] for client in group)
