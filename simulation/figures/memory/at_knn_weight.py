"""How new clients do with a λ that all of them share: curves, and no choice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datastore.tuning.candidates import Candidates, weights_to_choose_from
from simulation.figures.curves import Curve, curve_over
from simulation.figures.folder import PartRecord
from simulation.figures.memory.panel import Deal, Records
from simulation.figures.memory.settings import MemorySettings
from simulation.figures.remembering import count_correct_with_each, size_at


def accuracies(deal: Deal, capacity: float, choices: Candidates) -> Tensor:
    """Return the accuracy with each λ, k and σ, float64 of the choices' `shape`.

    Parameters
    ----------
    deal
        Clients whose memory holds a part of their images.
    capacity
        That part.
    choices
        The values of λ, k and σ.
    """
    correct = torch.zeros(choices.shape, dtype=torch.float64)
    for client in deal.clients:
        num_known = size_at(len(client.known), capacity)
        correct += count_correct_with_each(
            client, num_known, deal.rememberer.knn, choices
        )
    return correct / deal.num_test


def curves_by_knn_weight(records: Records, settings: MemorySettings) -> Sequence[Curve]:
    """Return the curves of records ``{"lines": {label: accuracy by λ}}``."""
    (deals,) = records.values()
    weights = weights_to_choose_from(settings.knn_weights)
    return [
        curve_over(label, weights, [record["lines"][label] for record in deals])
        for label in deals[0]["lines"]
    ]


def lines_of(lines: Sequence[tuple[str, Tensor]]) -> PartRecord:
    """Return the record of labelled accuracies by λ, each of shape (l,)."""
    return {"lines": {label: values.tolist() for label, values in lines}}
