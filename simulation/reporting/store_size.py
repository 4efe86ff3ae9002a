"""Accuracy by the number of examples in a client's memory."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from simulation.figures.palette import SOFT, Color
from simulation.reporting.client_rows import ClientRow, client_rows
from simulation.reporting.drawing import (
    Picture,
    first_found,
    name_sides,
    small_multiples,
    whole_fractions,
    whole_numbers,
    wrapped,
)
from simulation.reporting.setups import Setup, split_of

MOST_CLASSES = 6
FEWEST_CLIENTS = 5
_WIDE_RANGE = 30.0


@dataclass(frozen=True)
class SizeClass:
    """Clients with memories of about the same size.

    Attributes
    ----------
    smallest, largest, mean_size
        Examples in their memories.
    num_clients
        How many they are.
    accuracy, accuracy_global
        Of the personalised and of the unpersonalised models: share of all their test
        examples that are right.
    """

    smallest: int
    largest: int
    mean_size: float
    num_clients: int
    accuracy: float
    accuracy_global: float


def size_classes(clients: Sequence[ClientRow]) -> list[SizeClass]:
    """Return classes of about as many clients each, the smallest memories first.

    There are `MOST_CLASSES` at most, of `FEWEST_CLIENTS` at least where there are as
    many. Clients with memories of the same size are never parted. Clients without a
    memory are left out.
    """
    sized = sorted(
        (one for one in clients if one.num_stored is not None),
        key=lambda one: one.num_stored or 0,
    )
    count = min(MOST_CLASSES, max(len(sized) // FEWEST_CLIENTS, 1))
    classes: list[list[ClientRow]] = []
    for place, client in enumerate(sized):
        is_full = place >= len(sized) * len(classes) / count
        if not classes or (
            is_full and client.num_stored != sized[place - 1].num_stored
        ):
            classes.append([])
        classes[-1].append(client)
    return [_size_class(found) for found in classes]


def draw_store_sizes(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup with memories; None where there is none."""
    found = first_found(
        (setup.label, size_classes(client_rows(setup)) or None) for setup in setups
    )
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    compared = {setup.label for setup in setups if setup.has_reference}
    for axes, (label, classes) in zip(panels, found.items(), strict=True):
        _draw(axes, classes, colors[label])
        if label in compared:
            _draw_reference(axes, classes)
        axes.set_title(wrapped(label))
        whole_fractions(axes)
    if _is_wide([one.mean_size for classes in found.values() for one in classes]):
        panels[0].set_xscale("log")
    else:
        whole_numbers(panels[0].xaxis)
    name_sides(panels, "examples in the memory", f"{split_of(setups)} accuracy")
    told = (
        _told(label, classes, label in compared) for label, classes in found.items()
    )
    beginning = f"{split_of(setups).capitalize()} accuracy by the size of the memory"
    return Picture(figure, f"{beginning}. {'; '.join(told)}.")


def _size_class(clients: Sequence[ClientRow]) -> SizeClass:
    sizes = [one.num_stored or 0 for one in clients]
    tests = [one.num_test for one in clients]
    return SizeClass(
        smallest=min(sizes),
        largest=max(sizes),
        mean_size=statistics.fmean(sizes),
        num_clients=len(clients),
        accuracy=statistics.fmean((one.accuracy for one in clients), tests),
        accuracy_global=statistics.fmean(
            (one.accuracy_global for one in clients), tests
        ),
    )


def _draw(axes: Axes, classes: Sequence[SizeClass], color: Color) -> None:
    sizes = [one.mean_size for one in classes]
    own = [one.accuracy for one in classes]
    axes.plot(sizes, own, "o-", color=color.light, markersize=4)


def _draw_reference(axes: Axes, classes: Sequence[SizeClass]) -> None:
    axes.plot(
        [one.mean_size for one in classes],
        [one.accuracy_global for one in classes],
        "s--",
        color=SOFT.light,
        markersize=3.5,
        linewidth=1.2,
    )


def _is_wide(sizes: Sequence[float]) -> bool:
    return min(sizes) > 0 and max(sizes) / min(sizes) > _WIDE_RANGE


def _told(label: str, classes: Sequence[SizeClass], is_compared: bool) -> str:
    """Return the numbers of a panel as text."""

    def told(one: SizeClass) -> str:
        own = f"{one.smallest} to {one.largest} examples {100 * one.accuracy:.1f} %"
        reference = f" (global model {100 * one.accuracy_global:.1f} %)"
        return own + reference if is_compared else own

    return f"{label}: {', '.join(map(told, classes))}"
