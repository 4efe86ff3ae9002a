"""Test accuracy by the size of the memory and α: knn-per.txt, Figure 1."""

from collections.abc import Sequence

from simulation.figures.curves import Curve
from simulation.figures.folder import PartRecord
from simulation.figures.memory.at_capacity import at_capacity, curve_of
from simulation.figures.memory.panel import Deal, Panel, Records
from simulation.figures.memory.settings import MemorySettings


def _measure(deal: Deal) -> PartRecord:
    return {"points": [at_capacity(deal, one) for one in deal.settings.capacities]}


def _curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    return [
        curve_of(
            f"{alpha:g}", settings.capacities, [record["points"] for record in deals]
        )
        for alpha, deals in records.items()
    ]


PANEL = Panel(
    name="capacity",
    title="Memory of new clients (Figure 1)",
    line_name="alpha",
    x_name="capacity",
    x_label="capacity, as a fraction of the client's images",
    legend=r"$\alpha$",
    measure=_measure,
    curves=_curves,
    alphas=lambda settings: settings.alphas,
)
