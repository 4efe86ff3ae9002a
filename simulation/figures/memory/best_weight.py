"""The best λ of a client by the images it stores: knn-per.txt, Figure 8.

The paper's λ_opt is the best on a client's test images, which no client can know. What
it can know is the λ that it chooses on its own images; both are shown. The few test
images of a small client leave many λ equally good, of which the smallest counts; so the
λ that is best for all clients of one size together is shown too.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from datastore.tuning.candidates import candidates, weights_to_choose_from
from simulation.figures.curves import Curve, correlation
from simulation.figures.folder import PartRecord
from simulation.figures.memory.panel import Deal, Panel, Records
from simulation.figures.memory.settings import MemorySettings
from simulation.figures.remembering import count_correct_with_each, size_at

Weights = Sequence[float]
Points = Sequence[PartRecord]


def _measure(deal: Deal) -> PartRecord:
    """Return of each client and capacity the λ chosen, and what each λ gets right."""
    return {"points": list(_points(deal))}


def _points(deal: Deal) -> Iterator[PartRecord]:
    knn = deal.rememberer.knn
    choices = candidates(knn.knn_weights, (knn.num_neighbors,), (knn.kernel_scale,))
    for client in deal.clients:
        sizes = {size_at(len(client.known), one) for one in deal.settings.capacities}
        # Without stored or test images no λ is better than another.
        for size in sorted(sizes - {0}) if len(client.test) > 0 else ():
            correct = count_correct_with_each(client, size, knn, choices)
            yield {
                "size": size,
                "chosen": deal.rememberer.predictor(client, size).effective_knn_weight,
                "correct": [int(one) for one in correct.flatten()],
            }


def _chosen(weights: Weights, points: Points) -> float:  # noqa: ARG001
    return statistics.fmean(point["chosen"] for point in points)


def _best_of_each(weights: Weights, points: Points) -> float:
    # argmax returns the first of several largest.
    return statistics.fmean(weights[int(np.argmax(one["correct"]))] for one in points)


def _best_together(weights: Weights, points: Points) -> float:
    right = np.sum([point["correct"] for point in points], axis=0)
    return weights[int(np.argmax(right))]


_OF_EACH: Mapping[str, Callable[[Weights, Points], float]] = {
    "chosen by the client": _chosen,
    "λ_opt, best on its test images (the paper's)": _best_of_each,
}
_LINES = {
    **_OF_EACH,
    "best on the test images of all of that size": _best_together,
}


def _curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    by_size = [_by_size(record["points"]) for record in deals]
    weights = weights_to_choose_from(settings.knn.knn_weights)
    return [
        _curve(label, by_size, partial(line, weights)) for label, line in _LINES.items()
    ]


def _by_size(points: Points) -> Mapping[int, Points]:
    """Return the points by the power of two that is not above their size."""
    found: dict[int, list[PartRecord]] = defaultdict(list)
    for point in points:
        found[2 ** math.floor(math.log2(point["size"]))].append(point)
    return found


def _curve(
    label: str,
    deals: Sequence[Mapping[int, Points]],
    line: Callable[[Points], float],
) -> Curve:
    """Return λ by size; very small and large sizes are not in every deal."""
    sizes = sorted({size for deal in deals for size in deal})
    found = [[line(deal[size]) for deal in deals if size in deal] for size in sizes]
    counts = [sum(len(deal.get(size, ())) for deal in deals) for size in sizes]
    return Curve(
        label,
        tuple(sizes),
        tuple(statistics.fmean(one) for one in found),
        tuple(statistics.stdev(one) if len(one) > 1 else None for one in found),
        {"num_points": counts},
    )


def _correlations(
    records: Records, settings: MemorySettings
) -> Mapping[str, float | None]:
    """Return how the λ of each point goes with the logarithm of its size."""
    points = [
        point for deals in records.values() for one in deals for point in one["points"]
    ]
    weights = weights_to_choose_from(settings.knn.knn_weights)
    sizes = [math.log(point["size"]) for point in points]
    return {
        label: correlation(sizes, [line(weights, [point]) for point in points])
        for label, line in _OF_EACH.items()
    }


PANEL = Panel(
    name="best-weight",
    title="λ by the images that a client stores (Figure 8)",
    line_name="kind",
    x_name="num_stored_from",
    x_label="stored images: so many, and less than twice as many",
    legend="λ",
    measure=_measure,
    curves=_curves,
    y_name="knn_weight",
    y_label="λ",
    log_x=True,
    correlations=_correlations,
)
