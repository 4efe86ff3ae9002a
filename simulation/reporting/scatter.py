"""Each client's accuracy with the global and with its own model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from simulation.figures.palette import Color
from simulation.reporting.client_rows import ClientRow, client_rows
from simulation.reporting.drawing import (
    Picture,
    draw_diagonal,
    first_found,
    name_sides,
    small_multiples,
    whole_fractions,
    write_title,
)
from simulation.reporting.setups import Setup

_LARGEST_AREA, _SMALLEST_AREA = 240.0, 9.0  # square points
_MARKERS = {True: "o", False: "s"}


@dataclass(frozen=True)
class Scatter:
    """The clients of a setup, of all seeds.

    Attributes
    ----------
    points
        How many clients there are by (seen, accuracy of the unpersonalised model,
        accuracy of the personalised one).
    num_better, num_equal, num_worse
        Clients whose own model is right more often, as often, less often.
    """

    points: Mapping[tuple[bool, float, float], int]
    num_better: int
    num_equal: int
    num_worse: int

    @classmethod
    def of(cls, clients: Sequence[ClientRow]) -> "Scatter":
        """Return the scatter of clients."""
        points = Counter(
            (one.seen, one.accuracy_global, one.accuracy) for one in clients
        )
        return cls(
            points,
            num_better=sum(one.accuracy > one.accuracy_global for one in clients),
            num_equal=sum(one.accuracy == one.accuracy_global for one in clients),
            num_worse=sum(one.accuracy < one.accuracy_global for one in clients),
        )

    @property
    def verdict(self) -> str:
        """The counts as text."""
        return (
            f"{self.num_better} better, {self.num_equal} equal, {self.num_worse} worse"
        )


def scatters(setups: Sequence[Setup]) -> dict[str, Scatter]:
    """Return the scatters by label, of the setups that personalise anything.

    Those whose unpersonalised model means nothing are left out.
    """
    return first_found((setup.label, _scatter(setup)) for setup in setups)


def draw_scatters(
    setups: Sequence[Setup], colors: Mapping[str, Color]
) -> Picture | None:
    """Draw a panel a setup; None where no client's model is its own."""
    found = scatters(setups)
    if not found:
        return None
    figure, panels = small_multiples(len(found))
    for axes, (label, scatter) in zip(panels, found.items(), strict=True):
        draw_diagonal(axes)
        _draw(axes, scatter, colors[label])
        write_title(axes, label, scatter.verdict)
        axes.set_aspect("equal")
        whole_fractions(axes, both=True)
    name_sides(panels, "accuracy, global model", "accuracy, own model")
    told = (f"{label}: {scatter.verdict}" for label, scatter in found.items())
    return Picture(
        figure, f"Clients that their own model serves, by method. {'; '.join(told)}."
    )


def _scatter(setup: Setup) -> Scatter | None:
    if not setup.has_reference:
        return None
    scatter = Scatter.of(client_rows(setup))
    return scatter if scatter.num_better + scatter.num_worse else None


def _draw(axes: Axes, scatter: Scatter, color: Color) -> None:
    most = max(scatter.points.values())
    for seen, marker in _MARKERS.items():
        points = {key: count for key, count in scatter.points.items() if key[0] == seen}
        axes.scatter(
            [point[1] for point in points],
            [point[2] for point in points],
            s=[
                max(_LARGEST_AREA * count / most, _SMALLEST_AREA)
                for count in points.values()
            ],
            marker=marker,
            facecolors=color.light if seen else "none",
            edgecolors=color.light,
            alpha=0.55 if seen else 0.9,
            linewidths=0 if seen else 1.0,
            clip_on=False,
        )
