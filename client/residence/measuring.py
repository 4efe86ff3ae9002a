"""How accurate a client's predictions are, measured without fooling oneself."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from client.residence.serving import Accuracy, Gain, MeasuredOn
from datastore.prediction.interpolation import interpolate
from datastore.prediction.kernel import KERNELS
from datastore.prediction.vote import neighbor_vote
from datastore.store_reader import StoreReader
from datastore.tuning.candidates import Choice
from datastore.tuning.evidence import Evidence
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.memory import KnnSettings, choose_on
from strategies.core.memory_evidence import left_out_evidence

FEWEST = 10
"""Fewer examples say nothing about an accuracy: its interval would span 50 points."""

MOST = 2000
"""The margin of so many is about a point; more only take longer."""

NUM_FOLDS = 10
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """What was measured on examples that the client knows.

    Attributes
    ----------
    accuracy
        Of the global model, of the neighbours and of both.
    gain
        Of both over the global model.
    """

    accuracy: Accuracy
    gain: Gain

    @property
    def is_loss(self) -> bool:
        """Whether mixing is worse than the global model beyond doubt."""
        gain = self.gain
        if gain.expected is None or gain.margin is None:
            return False
        return gain.expected + gain.margin < 0


UNKNOWN = Estimate(Accuracy(), Gain())


def estimate(
    model: GlobalModel,
    store: StoreReader,
    positions: Tensor,
    settings: KnnSettings,
    measured_on: MeasuredOn,
) -> Estimate:
    """Return what to expect of a client's memory, by nested cross-validation.

    Every example that is measured is looked up among all others that are stored, with
    what the other nine tenths of them choose: it has no part in what
    predicts it.

    Parameters
    ----------
    model
        Has embedded the store.
    store
        The client's memory.
    positions
        Of the examples to measure among the stored ones, int64 of shape (m,). The
        global model should not have been trained on them.
    settings
        How the client chooses.
    measured_on
        What they are.
    """
    if len(positions) < FEWEST:
        return Estimate(Accuracy(), Gain(num_examples=len(positions)))
    most = max(settings.candidates().num_neighbors)
    evidence = left_out_evidence(
        store, _spread(positions), model.head, most, settings.class_prior
    )
    outcomes = torch.cat(
        [_outcomes(evidence, fold, store, settings) for fold in _folds(len(evidence))]
    )
    alone, knn, mixed = outcomes.double().mean(dim=0).tolist()
    accuracy = Accuracy(alone, knn, mixed, len(outcomes), measured_on)
    return Estimate(accuracy, paired_gain(outcomes[:, 0], outcomes[:, 2]))


def paired_gain(before: Tensor, after: Tensor) -> Gain:
    """Return by how much ``after`` is right more often than ``before``.

    Parameters
    ----------
    before, after
        Whether each example was predicted rightly, bool of shape (m,).
    """
    count = len(before)
    won = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    # Half an example more in each cell of the table, which keeps small counts honest.
    total, changed, surplus = count + 2, won + lost + 1, won - lost
    variance = (changed - surplus**2 / total) / total**2
    return Gain((won - lost) / count, NORMAL_95 * math.sqrt(variance), count)


def _spread(positions: Tensor) -> Tensor:
    """Return at most `MOST` of the positions, evenly spread."""
    chosen = torch.linspace(0, len(positions) - 1, min(len(positions), MOST))
    return positions[chosen.round().long()]


def _folds(num_examples: int) -> Iterator[Tensor]:
    """Yield which examples are in each fold, bool of shape (m,)."""
    # Every tenth: a site's files come sorted by class.
    fold_of = torch.arange(num_examples) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        yield fold_of == fold


def _outcomes(
    evidence: Evidence, fold: Tensor, store: StoreReader, settings: KnnSettings
) -> Tensor:
    """Return who is right in a fold, bool (m, 3): global model, neighbours, both."""
    choice = choose_on(evidence.take(~fold), len(store), settings)
    asked = evidence.take(fold)
    alone, labels = asked.queries.probabilities, asked.queries.labels
    knn = _votes(asked, choice, settings)
    prior = choice.class_prior
    served = asked.queries if prior is None else asked.queries.adapted(prior.sharpness)
    mixed = interpolate(knn, served.probabilities, choice.knn_weight)
    return torch.stack(
        [one.argmax(dim=1) == labels for one in (alone, knn, mixed)], dim=1
    )


def _votes(evidence: Evidence, choice: Choice, settings: KnnSettings) -> Tensor:
    count, embeddings = choice.num_neighbors, evidence.queries.embeddings
    log_weights = KERNELS[settings.kernel](
        evidence.squared_distances[:, :count],
        choice.kernel_scale,
        embeddings.shape[1],
    )
    labels = evidence.neighbor_labels[:, :count]
    return neighbor_vote(log_weights, labels, evidence.queries.probabilities.shape[1])
