"""Colours that are told apart by everybody, on white and on black."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Color:
    """One colour in two shades of nearly the same hue.

    Attributes
    ----------
    light, dark
        ``#rrggbb``, at a contrast of 3 to 1 at least to a white and a black ground.
    """

    light: str
    dark: str


INK = Color("#1d2430", "#e9ecf1")
"""Text."""
SOFT = Color("#5a6372", "#a3acba")
"""Axes, and what is only compared with: the unpersonalised model, the diagonal."""
FAINT = Color("#dcdfe4", "#343b46")
"""Grids."""

SERIES = (
    Color("#0072b2", "#5db4ee"),
    Color("#c44e00", "#ff9350"),
    Color("#00805c", "#35cfa2"),
    Color("#a3478b", "#e791cc"),
    Color("#8f6b00", "#e3bf45"),
    Color("#5b50c4", "#a9a1ff"),
    Color("#7a3e1d", "#d29a78"),
    Color("#3d7f8f", "#7fd0e2"),
)
"""After Okabe and Ito, "Color universal design", 2008, darkened for thin lines."""

_OF_METHOD = {"kNN-Per": 0, "FedAvg": 1, "FedAvg+": 2, "Local": 3}


def colors_of(titles: Iterable[str]) -> list[Color]:
    """Return a colour for each title; the same method has the same one everywhere.

    Methods without a colour of their own, and a title that comes again, have those that
    are left, in their order. As many titles as there are colours share none.
    """
    titles = list(titles)
    own = {
        titles.index(title): place
        for title, place in _OF_METHOD.items()
        if title in titles
    }
    first = range(min(len(titles), len(SERIES)))
    taken = {own[number] for number in first if number in own}
    left = iter(place for place in range(len(SERIES)) if place not in taken)
    chosen = {number: next(left) for number in first if number not in own} | own
    return [
        SERIES[chosen.get(number, number % len(SERIES))]
        for number in range(len(titles))
    ]
