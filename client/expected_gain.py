"""The accuracy that a client can expect of its memory, by nested cross-validation."""

import math

import torch
from torch import Tensor

from knnper.client.state import Accuracy, Gain, MeasuredOn
from knnper.datastore.memory import KnnSettings
from knnper.datastore.prediction import KERNELS, interpolate, neighbor_vote
from knnper.datastore.store import StoreReader
from knnper.datastore.tuning import (
    Evidence,
    choose_parameters,
    evenly_spread,
    left_out_evidence,
    parameter_grid,
)
from knnper.strategies.core.exported_model import GlobalModel

FEWEST = 10  # with fewer examples the interval would span 50 points
MOST = 2000  # their margin is about one point; more examples only take longer
NUM_FOLDS = 10
NORMAL_95 = 1.96


def estimate(
    model: GlobalModel,
    store: StoreReader,
    positions: Tensor,
    settings: KnnSettings,
    measured_on: MeasuredOn,
) -> tuple[Accuracy, Gain]:
    """Estimate accuracies of a client's memory on some of its stored examples.

    The hyper-parameters that predict an example are chosen on the other nine folds.

    Parameters
    ----------
    positions
        Positions of the examples in the store, int64 (m,). The model should not have
        been trained on them.
    """
    if len(positions) < FEWEST:
        return Accuracy(), Gain(num_examples=len(positions))
    most_neighbors = max(parameter_grid(settings).num_neighbors)
    # A site's files come sorted by class: examples are picked at even distances, and a
    # fold takes every tenth of them.
    sampled = positions[evenly_spread(len(positions), MOST)]
    evidence = left_out_evidence(
        store, sampled, model.head, most_neighbors, settings.class_prior
    )
    fold_of = torch.arange(len(evidence)) % NUM_FOLDS
    is_correct = torch.cat(
        [
            _correct_in_fold(evidence, fold_of == fold, len(store), settings)
            for fold in range(NUM_FOLDS)
        ]
    )
    global_model, knn, mixed = is_correct.double().mean(dim=0).tolist()
    accuracy = Accuracy(global_model, knn, mixed, len(is_correct), measured_on)
    return accuracy, paired_gain(is_correct[:, 0], is_correct[:, 2])


def paired_gain(before: Tensor, after: Tensor) -> Gain:
    """Compare two predictors that were correct on ``before`` and ``after``, bool (m,).

    Source: Agresti and Min 2005; half an example is added to each cell of the table of
    matched pairs, which keeps the interval honest with small counts.
    """
    count = len(before)
    won = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    total = count + 2
    variance = (won + lost + 1 - (won - lost) ** 2 / total) / total**2
    return Gain((won - lost) / count, NORMAL_95 * math.sqrt(variance), count)


def _correct_in_fold(
    evidence: Evidence, in_fold: Tensor, num_stored: int, settings: KnnSettings
) -> Tensor:
    """Predict a fold with the choice made on the others.

    Returns whether global model, neighbours and mixture are correct, bool (m, 3).
    """
    choice = choose_parameters(evidence.take(~in_fold), num_stored, settings)
    held_out = evidence.take(in_fold)
    count = choice.num_neighbors
    queries = held_out.queries
    prior = choice.class_prior
    log_weights = KERNELS[settings.kernel](
        held_out.squared_distances[:, :count],
        choice.kernel_scale,
        queries.embeddings.shape[1],
    )
    p_global, labels = queries.probabilities, queries.labels
    p_knn = neighbor_vote(
        log_weights, held_out.neighbor_labels[:, :count], p_global.shape[1]
    )
    adapted = queries if prior is None else queries.adapted(prior.sharpness)
    p_mixed = interpolate(p_knn, adapted.probabilities, choice.knn_weight)
    return torch.stack(
        [
            probabilities.argmax(dim=1) == labels
            for probabilities in (p_global, p_knn, p_mixed)
        ],
        dim=1,
    )
