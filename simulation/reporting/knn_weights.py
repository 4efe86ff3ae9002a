"""What weight clients give their memory: a histogram of λ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from simulation.figures.palette import Color
from simulation.reporting.client_rows import ClientRow, client_rows
from simulation.reporting.drawing import (
    Picture,
    first_found,
    name_sides,
    small_multiples,
    whole_numbers,
    write_title,
)
from simulation.reporting.setups import Setup

NUM_BINS = 20


@dataclass(frozen=True)
class WeightCounts:
    """How many clients have a λ of about so much.

    Attributes
    ----------
    seen, unseen
        Clients in each of `NUM_BINS` + 1 bins, whose middles are 0, 0.05, ... 1.
    mean
        Of all clients' λ.
    """

    seen: tuple[int, ...]
    unseen: tuple[int, ...]
    mean: float


def weight_counts(clients: Sequence[ClientRow]) -> WeightCounts | None:
    """Return the histogram of the clients that have a λ; None if none has."""
    weights = [one.knn_weight for one in clients if one.knn_weight is not None]
    if not weights:
        return None
    return WeightCounts(
        seen=_counts(clients, seen=True),
        unseen=_counts(clients, seen=False),
        mean=float(np.mean(weights)),
    )


def draw_weights(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup that mixes in a memory; None where there is none."""
    found = first_found(
        (setup.label, weight_counts(client_rows(setup))) for setup in setups
    )
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    for axes, (label, counts) in zip(panels, found.items(), strict=True):
        _draw(axes, counts, colors[label])
        write_title(axes, label, f"mean {counts.mean:.2f}")
    whole_numbers(panels[0].yaxis)
    name_sides(panels, "λ (1: memory alone)", "clients")
    return Picture(figure, _alternative(found))


def _counts(clients: Sequence[ClientRow], *, seen: bool) -> tuple[int, ...]:
    bins = [
        round(NUM_BINS * one.knn_weight)
        for one in clients
        if one.knn_weight is not None and one.seen == seen
    ]
    return tuple(np.bincount(bins, minlength=NUM_BINS + 1).tolist())


def _draw(axes: Axes, counts: WeightCounts, color: Color) -> None:
    seen, unseen = np.array(counts.seen), np.array(counts.unseen)
    for heights, bottom, face in (
        (seen, np.zeros_like(seen), color.light),
        (unseen, seen, "none"),
    ):
        (there,) = np.nonzero(heights)
        axes.bar(
            there / NUM_BINS,
            heights[there],
            0.8 / NUM_BINS,
            bottom=bottom[there],
            facecolor=face,
            edgecolor=color.light,
            linewidth=1.0,
        )
    axes.set_xlim(-0.05, 1.05)
    axes.grid(visible=False, axis="x")


def _alternative(found: Mapping[str, WeightCounts]) -> str:
    told = []
    for label, counts in found.items():
        both = np.add(counts.seen, counts.unseen)
        bins = ", ".join(
            f"{place / NUM_BINS:g} for {count}"
            for place, count in enumerate(both)
            if count
        )
        told.append(f"{label}: mean {counts.mean:.2f}; {bins} clients")
    return f"The clients' λ. {'. '.join(told)}."
