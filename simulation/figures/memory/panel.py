"""What the figures of the memory have in common: a deal goes in, curves come out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from simulation.figures.curves import Curve
from simulation.figures.folder import PartRecord
from simulation.figures.memory.settings import MemorySettings
from simulation.figures.newcomers import Newcomer
from simulation.figures.remembering import Rememberer

Records = Mapping[float, Sequence[PartRecord]]
"""By alpha, what was measured in each deal."""


@dataclass(frozen=True, eq=False)
class Deal:
    """New clients, and how they remember.

    Attributes
    ----------
    clients
        With some images each, or none.
    rememberer
        What they serve.
    settings
        Which points are shown.
    """

    clients: Sequence[Newcomer]
    rememberer: Rememberer
    settings: MemorySettings

    @property
    def num_test(self) -> int:
        """Test images of all clients."""
        return sum(len(client.test) for client in self.clients)

    @property
    def mean_size(self) -> float:
        """Images that a client has to learn from, on average."""
        return sum(len(client.known) for client in self.clients) / len(self.clients)

    def with_neighbors(self, num_neighbors: int) -> "Deal":
        """Return the same clients with this k, which none of them chooses."""
        knn = self.rememberer.knn
        fixed = replace(
            knn,
            num_neighbors=num_neighbors,
            tuning=replace(knn.tuning, num_neighbors_grid=()),
        )
        return replace(self, rememberer=replace(self.rememberer, knn=fixed))

    def accuracy(self, num_correct: float) -> float:
        """Return the part of all test images that is right."""
        return num_correct / self.num_test


@dataclass(frozen=True)
class Panel:
    """One figure of the memory.

    Attributes
    ----------
    name
        Of its files.
    title
        What it shows.
    line_name, x_name, y_name
        Columns of the table: what a line is of, and the axes.
    legend
        What a line is of, for people.
    x_label, y_label
        Of the axes.
    measure
        ``deal -> record``: what one deal shows, plain values.
    curves
        ``(records, settings) -> curves``.
    alphas
        ``settings -> α`` of its deals.
    log_x
        Whether the horizontal axis is logarithmic.
    correlations
        ``(records, settings) -> {line: correlation of the axes}``, where that is of
        interest.
    """

    name: str
    title: str
    line_name: str
    x_name: str
    x_label: str
    legend: str
    measure: Callable[[Deal], PartRecord]
    curves: Callable[[Records, MemorySettings], Sequence[Curve]]
    y_name: str = "accuracy"
    y_label: str = "test accuracy"
    alphas: Callable[[MemorySettings], tuple[float, ...]] = lambda one: (one.alpha,)
    log_x: bool = False
    correlations: Callable[[Records, MemorySettings], Mapping[str, float | None]] = (
        lambda *_: {}
    )
