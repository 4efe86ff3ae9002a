"""What new clients serve whose memories hold a part of their images."""

import statistics
from collections.abc import Callable, Sequence

from simulation.figures.curves import Curve, curve_over
from simulation.figures.folder import PartRecord
from simulation.figures.memory.panel import Deal
from simulation.figures.remembering import count_correct, size_at


def at_capacity(deal: Deal, capacity: float) -> PartRecord:
    """Return what `at_sizes` does of clients that have that part of their images."""
    return at_sizes(deal, lambda num_known: size_at(num_known, capacity))


def at_sizes(deal: Deal, size_of: Callable[[int], int]) -> PartRecord:
    """Return how the clients do, each with some of its images.

    λ is chosen by each client on these images.

    Parameters
    ----------
    deal
        The clients.
    size_of
        ``n_m -> size``: how many of all its images a client has.

    Returns
    -------
    Mapping
        ``accuracy``, of all test images; ``num_stored``, of all clients together;
        ``knn_weight``, the mean λ of the clients.
    """
    correct, stored, weights = 0, 0, []
    for client in deal.clients:
        num_known = size_of(len(client.known))
        predictor = deal.rememberer.predictor(client, num_known)
        correct += count_correct(predictor, client)
        stored += num_known
        weights.append(predictor.effective_knn_weight)
    return {
        "accuracy": deal.accuracy(correct),
        "num_stored": stored,
        "knn_weight": statistics.fmean(weights),
    }


def column(points: Sequence[PartRecord], name: str) -> list[float]:
    """Return one figure of each point."""
    return [point[name] for point in points]


def curve_of(
    label: str, places: Sequence[float], deals: Sequence[Sequence[PartRecord]]
) -> Curve:
    """Return the accuracies of several deals, the points of `at_capacity` each."""

    def mean(name: str) -> list[float]:
        values = zip(*(column(points, name) for points in deals), strict=True)
        return [statistics.fmean(one) for one in values]

    details = {
        "num_stored": mean("num_stored"),
        "knn_weight": mean("knn_weight"),
    }
    return curve_over(
        label, places, [column(one, "accuracy") for one in deals], details
    )
