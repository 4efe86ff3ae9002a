from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from knnper.data.arrays import NpzSettings
from knnper.data.site import match_labels
from knnper.data.site_data import CollectedExamples
from knnper.data.site_inputs import ArrayInputs
from knnper.errors import DataError


def agreed(
    labels: Sequence[str],
    class_names: Sequence[str],
    *,
    numbered: bool = False,
    **settings: Any,
) -> tuple[tuple[int | None, ...], dict[str, int]]:
    found = CollectedExamples(
        source="here",
        names=tuple(map(str, range(len(labels)))),
        labels=tuple(labels),
        inputs=ArrayInputs("here", np.zeros((len(labels), 2))),
        numbered=numbered,
    )
    return match_labels(found, NpzSettings(path="here.npz", **settings), class_names)


def test_names_decide_and_not_positions() -> None:
    assert agreed(["a", "c", "b"], ["c", "b", "a"])[0] == (2, 0, 1)
    found = agreed(["kitty", "dog", "cat"], ["cat", "dog"], label_map={"kitty": "cat"})
    assert found == ((0, 1, 0), {})
    found = agreed(["a", "b"], ["a", "b"], label_map={"a": "b", "b": "a"})
    assert found[0] == (1, 0)


def test_a_map_that_leads_nowhere() -> None:
    message = r"maps 'kitty' to 'cats'.*did you mean 'cat'\? known: cat, dog"
    with pytest.raises(DataError, match=message):
        agreed(["dog"], ["cat", "dog"], label_map={"kitty": "cats"})


def test_numbers_are_positions_among_names_that_are_none() -> None:
    assert agreed(["2", "0"], ["a", "b", "c"], numbered=True)[0] == (2, 0)
    # They are names where classes are called by numbers.
    assert agreed(["7", "3"], ["3", "7"], numbered=True)[0] == (1, 0)


@pytest.mark.parametrize(
    ("labels", "class_names", "numbered", "unknown"),
    [
        (["3"], ["a", "b", "c"], True, "3"),
        (["-1"], ["a", "b", "c"], True, "-1"),
        (["0", "1"], ["1", "2"], True, "0"),
        (["0"], ["a", "b"], False, "0"),
    ],
)
def test_numbers_that_are_no_labels(
    labels: list[str], class_names: list[str], numbered: bool, unknown: str
) -> None:
    with pytest.raises(DataError, match=f"'{unknown}': 1 example\n"):
        agreed(labels, class_names, numbered=numbered)


def test_all_unknown_labels_are_listed_with_counts_and_a_guess() -> None:
    with pytest.raises(DataError) as caught:
        agreed(["cta", "gnu", "gnu", "cat"], ["cat", "dog"])
    assert str(caught.value) == (
        "here has 2 labels that the federation does not know:\n"
        "  - 'cta': 1 example; did you mean 'cat'?\n"
        "  - 'gnu': 2 examples\n"
        "Its classes: cat, dog. Map them (data.label_map: {'cta': "
        "..., 'gnu': ...}), or leave the examples out (data.unknown_labels: drop)"
    )


def test_unknown_labels_can_be_dropped() -> None:
    found = agreed(["gnu", "dog", "gnu"], ["cat", "dog"], unknown_labels="drop")
    assert found == ((None, 1, None), {"gnu": 2})
