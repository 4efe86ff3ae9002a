"""What a new client serves with a memory of a given size, and with what it might."""

from dataclasses import dataclass

import torch
from torch import Tensor

from datastore.examples import NewExamples, StoreSpec
from datastore.memory import UNNAMED, empty_memory_store, memory_store
from datastore.prediction.kernel import KERNELS
from datastore.prediction.predictor import KnnPredictor
from datastore.tuning.candidates import Candidates
from datastore.tuning.evidence import Queries, held_out
from datastore.tuning.scores import num_correct, score
from knnper.data.examples import Examples
from simulation.figures.embedded import Embedded
from simulation.figures.newcomers import Newcomer
from strategies.core.evaluation import evaluate
from strategies.core.memory import Apply, KnnSettings, remember


@dataclass(frozen=True, eq=False)
class Rememberer:
    """How new clients use their memory. It keeps all that a client has.

    Attributes
    ----------
    head
        From representations (n, p) to the global model's probabilities (n, c).
    knn
        k, kernel, σ, the grid of λ, and how to choose from it.
    validation_fraction
        Part of its images on which a client chooses, [0, 1).
    """

    head: Apply
    knn: KnnSettings
    validation_fraction: float

    def predictor(self, client: Newcomer, num_known: int) -> KnnPredictor:
        """Return what a client serves that has the first ``num_known`` of its images.

        λ is chosen on a part of them with the rest in the store, then all are stored:
        as `strategies.knn_per.memorize` does. Test images are not looked at. The
        predictor takes embeddings (n, p) in place of images.
        """
        known = client.known.slice(0, num_known)
        held = self._num_held_out(num_known)
        num_classes, dim = known.probabilities.shape[1], known.embeddings.shape[1]
        store = empty_memory_store(StoreSpec(num_classes), dim, UNNAMED)
        tuned = remember(
            store,
            _examples(known.slice(held, num_known)),
            _examples(known.slice(0, held)),
            self.head,
            self.knn,
        )
        return tuned.predictor(_as_it_is, self.head, store, self.knn)

    def _num_held_out(self, num_known: int) -> int:
        """Return how many are held out; some are left to be looked up."""
        count = int(self.validation_fraction * num_known + 0.5)
        return min(count, max(num_known - 1, 0))


def count_correct(predictor: KnnPredictor, client: Newcomer) -> int:
    """Return how many of a client's test images its predictor gets right."""
    test = client.test
    return evaluate(predictor, Examples(test.embeddings, test.labels)).num_correct


def count_correct_with_each(
    client: Newcomer, num_known: int, knn: KnnSettings, choices: Candidates
) -> Tensor:
    """Return how many test images are right with each λ, k and σ: a curve, no choice.

    Parameters
    ----------
    client
        With all of its first ``num_known`` images in the store; with none it serves
        the global model, whatever λ is.
    num_known
        n.
    knn
        Gives the kernel.
    choices
        The values of λ, k and σ.

    Returns
    -------
    Tensor
        float64, of the choices' `shape`.
    """
    known, test = client.known.slice(0, num_known), client.test
    if num_known == 0:
        return torch.full(choices.shape, test.num_correct(), dtype=torch.float64)
    store = memory_store(known.embeddings, known.labels, known.probabilities.shape[1])
    queries = Queries(test.embeddings, test.probabilities, test.labels)
    evidence = held_out(store, queries, max(choices.num_neighbors))
    return score(evidence, choices, KERNELS[knn.kernel], num_correct)


def size_at(num_known: int, capacity: float) -> int:
    """Return the images that fit: the nearest whole number, and all of them at most.

    Parameters
    ----------
    num_known
        n_m, all that the client has.
    capacity
        As a fraction of it, not negative.
    """
    return min(num_known, int(capacity * num_known + 0.5))


def _examples(embedded: Embedded) -> NewExamples:
    return NewExamples(embedded.embeddings, embedded.labels)


def _as_it_is(embeddings: Tensor) -> Tensor:
    return embeddings
