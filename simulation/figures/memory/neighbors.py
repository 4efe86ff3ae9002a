"""Test accuracy by the number of neighbours: knn-per.txt, Figure 5."""

from collections.abc import Sequence

from datastore.tuning.candidates import candidates
from simulation.figures.curves import Curve, curve_over
from simulation.figures.folder import PartRecord
from simulation.figures.memory.at_capacity import at_capacity
from simulation.figures.memory.at_knn_weight import accuracies
from simulation.figures.memory.panel import Deal, Panel, Records
from simulation.figures.memory.settings import MemorySettings

_CHOSEN, _ALONE = "λ chosen by each client", "neighbours alone (λ = 1)"


def _measure(deal: Deal) -> PartRecord:
    scale = (deal.rememberer.knn.kernel_scale,)
    alone = candidates((1.0,), deal.settings.num_neighbors, scale)
    return {
        "chosen": [
            at_capacity(deal.with_neighbors(count), 1.0)["accuracy"]
            for count in alone.num_neighbors
        ],
        "alone": accuracies(deal, 1.0, alone)[0, :, 0].tolist(),
    }


def _curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    places = sorted(set(settings.num_neighbors))
    return [
        curve_over(label, places, [record[name] for record in deals])
        for label, name in ((_CHOSEN, "chosen"), (_ALONE, "alone"))
    ]


PANEL = Panel(
    name="neighbors",
    title="Number of neighbours (Figure 5)",
    line_name="kind",
    x_name="num_neighbors",
    x_label="neighbours, k",
    legend="kNN-Per",
    measure=_measure,
    curves=_curves,
)
