"""Test accuracy by λ, for memories of several sizes: knn-per.txt, Figure 2."""

from datastore.tuning.candidates import candidates
from simulation.figures.folder import PartRecord
from simulation.figures.memory.at_knn_weight import (
    accuracies,
    curves_by_knn_weight,
    lines_of,
)
from simulation.figures.memory.panel import Deal, Panel


def _measure(deal: Deal) -> PartRecord:
    knn, settings = deal.rememberer.knn, deal.settings
    choices = candidates(
        settings.knn_weights, (knn.num_neighbors,), (knn.kernel_scale,)
    )
    return lines_of(
        [
            (str(size), accuracies(deal, size / deal.mean_size, choices)[:, 0, 0])
            for size in settings.sizes
        ]
    )


PANEL = Panel(
    name="knn-weight",
    title="λ of all clients, by the images that a client has (Figure 2)",
    line_name="mean_num_stored",
    x_name="knn_weight",
    x_label="λ (0: global model alone, 1: neighbours alone)",
    legend="images, on average",
    measure=_measure,
    curves=curves_by_knn_weight,
)
