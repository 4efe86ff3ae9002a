"""Test accuracy where memory is dealt unevenly: knn-per.txt, Figure 9.

Half of the clients are weak, with capacity ½ - ΔC, half are strong, with ½ + ΔC. Every
client is counted in both halves: that is a division and its opposite, pooled, so that
the two groups differ in their memory alone.
"""

from collections.abc import Sequence
from functools import partial

from simulation.figures.curves import Curve
from simulation.figures.folder import PartRecord
from simulation.figures.memory.at_capacity import at_sizes, curve_of
from simulation.figures.memory.panel import Deal, Panel, Records
from simulation.figures.memory.settings import MemorySettings
from simulation.figures.remembering import size_at

_LABELS = {"weak": "weak", "strong": "strong", "all": "average"}
"""Of each group of clients, the name of its line: the paper's."""


def _measure(deal: Deal) -> PartRecord:
    imbalances = deal.settings.imbalances
    weak = [at_sizes(deal, partial(_weak_size, one)) for one in imbalances]
    strong = [at_sizes(deal, partial(_strong_size, one)) for one in imbalances]
    both = [_mean(*pair) for pair in zip(weak, strong, strict=True)]
    return dict(zip(_LABELS, (weak, strong, both), strict=True))


def _strong_size(imbalance: float, num_known: int) -> int:
    return size_at(num_known, 0.5 + imbalance)


def _weak_size(imbalance: float, num_known: int) -> int:
    # What is left, not ½ - ΔC rounded by itself: the memory of all never changes.
    return num_known - _strong_size(imbalance, num_known)


def _mean(weak: PartRecord, strong: PartRecord) -> PartRecord:
    return {name: (weak[name] + strong[name]) / 2 for name in weak}


def _curves(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    (deals,) = records.values()
    return [
        curve_of(label, settings.imbalances, [record[group] for record in deals])
        for group, label in _LABELS.items()
    ]


PANEL = Panel(
    name="hardware",
    title="Weak and strong clients (Figure 9)",
    line_name="clients",
    x_name="imbalance",
    x_label="ΔC: capacity is ½ - ΔC of weak clients, ½ + ΔC of strong ones",
    legend="clients",
    measure=_measure,
    curves=_curves,
)
