"""What the memory makes of a global model: its neighbours alone, and mixed."""

from collections.abc import Sequence

from datastore.tuning.candidates import candidates
from knnper.config.seeding import RandomKey
from simulation.figures.folder import PartRecord
from simulation.figures.newcomers import Newcomer, NewcomerPool
from simulation.figures.quality.settings import QualitySettings
from simulation.figures.remembering import (
    Rememberer,
    count_correct,
    count_correct_with_each,
)
from simulation.trained_model import TrainedModel


def measure(
    model: TrainedModel, settings: QualitySettings, key: RandomKey
) -> PartRecord:
    """Return how new clients do with a global model.

    Parameters
    ----------
    model
        The model; clients of its run that took no part in training give the images.
    settings
        Who the new clients are.
    key
        Fixes who gets what; with the same key all models see the same clients.

    Returns
    -------
    Mapping
        ``global_accuracy``, and by α, as text, the accuracies of each deal: ``alone``
        (λ = 1) and ``mixed`` (λ chosen by each client on its own images).
    """
    pool = NewcomerPool(model)
    rememberer = Rememberer(model.head, settings.knn, settings.validation_fraction)
    num_clients = settings.num_clients or pool.num_clients
    found: dict[str, list[PartRecord]] = {}
    for alpha in settings.alphas:
        keys = [
            key.child("deal", number, f"{alpha:g}")
            for number in range(1, settings.num_deals + 1)
        ]
        deals = (pool.deal(num_clients, alpha, one) for one in keys)
        found[f"{alpha:g}"] = [_accuracies(deal, rememberer) for deal in deals]
    test = pool.test
    return {
        "num_test": len(test),
        "global_accuracy": test.num_correct() / len(test),
        "deals": found,
    }


def _accuracies(clients: Sequence[Newcomer], rememberer: Rememberer) -> PartRecord:
    knn = rememberer.knn
    alone = candidates((1.0,), (knn.num_neighbors,), (knn.kernel_scale,))
    right = {"alone": 0, "mixed": 0}
    for client in clients:
        size = len(client.known)
        right["alone"] += int(count_correct_with_each(client, size, knn, alone))
        right["mixed"] += count_correct(rememberer.predictor(client, size), client)
    num_test = sum(len(client.test) for client in clients)
    return {name: count / num_test for name, count in right.items()}
