"""Test accuracy by λ, for several scales of the kernel: knn-per.txt, Figure 7."""

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
        settings.knn_weights, (knn.num_neighbors,), settings.kernel_scales
    )
    found = accuracies(deal, 1.0, choices)
    return lines_of(
        [
            (f"{scale:g}", found[:, 0, place])
            for place, scale in reversed(list(enumerate(choices.kernel_scales)))
        ]
    )


PANEL = Panel(
    name="kernel-scale",
    title="λ of all clients, by the scale of the kernel (Figure 7)",
    line_name="kernel_scale",
    x_name="knn_weight",
    x_label="λ (0: global model alone, 1: neighbours alone)",
    legend=r"$\sigma$",
    measure=_measure,
    curves=curves_by_knn_weight,
)
