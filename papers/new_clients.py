"""New clients: images of unseen clients, partitioned again, and served with a memory.

Marfoq et al. 2022, section 6: the global model does not change.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from knnper import Examples, LabelledArrays, RandomKey, RunError
from knnper.datastore.examples import NewExamples, StoreSpec
from knnper.datastore.memory import KnnSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import (
    KERNELS,
    Apply,
    KnnPredictor,
    NeighborClassifier,
    interpolate,
)
from knnper.datastore.store import UNNAMED, Store, empty_memory_store, memory_store
from knnper.datastore.tuning import (
    ParameterGrid,
    Queries,
    fill_and_tune,
    held_out,
    num_correct,
    score,
)
from knnper.simulation.partition.allocation import Integers
from knnper.simulation.partition.clients import ClientPart
from knnper.simulation.partition.dirichlet import DirichletSettings, dirichlet
from knnper.simulation.partition.settings import PartitionSettings
from knnper.simulation.trained_model import TrainedModel
from knnper.strategies import evaluate
from papers.figures import knn_settings


@dataclass(frozen=True, eq=False)
class Embedded:
    """n embedded images: φ(x) (n, p), global probabilities (n, c), labels (n,)."""

    embeddings: Tensor
    probabilities: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def at(self, chosen: slice | Tensor) -> "Embedded":
        """Return the chosen images."""
        return Embedded(
            self.embeddings[chosen], self.probabilities[chosen], self.labels[chosen]
        )

    def first(self, count: int) -> "Embedded":
        """Return the first ``count`` images."""
        return self.at(slice(count))

    def followed_by(self, other: "Embedded") -> "Embedded":
        """Concatenate two sets of images."""
        return Embedded(
            torch.cat([self.embeddings, other.embeddings]),
            torch.cat([self.probabilities, other.probabilities]),
            torch.cat([self.labels, other.labels]),
        )

    def num_correct(self, local: Tensor | None = None, knn_weight: float = 0.0) -> int:
        """Count correct predictions of the global model, with or without a memory."""
        mixed = self.probabilities
        if local is not None:
            mixed = interpolate(local, mixed, knn_weight)
        return int((mixed.argmax(dim=1) == self.labels).sum())

    def store(self, settings: StoreSettings | None = None) -> Store:
        """Store the images in a memory."""
        num_classes = self.probabilities.shape[1]
        return memory_store(self.embeddings, self.labels, num_classes, settings)


def embed(model: TrainedModel, split: LabelledArrays, indices: Integers) -> Embedded:
    """Embed the images of a split at ``indices``, (n,), with the global model."""
    examples = split.examples_at(indices)
    embeddings = model.embed(examples.images)
    return Embedded(embeddings, model.head(embeddings), examples.labels)


def classifier(store: Store, knn: KnnSettings) -> NeighborClassifier:
    """Return the function from embeddings to the votes of stored neighbours."""
    return NeighborClassifier(store, knn.num_neighbors, knn.kernel, knn.kernel_scale)


@dataclass(frozen=True, eq=False)
class NewClient:
    """A new client's known images, in random order, and its test images."""

    known: Embedded
    test: Embedded


@dataclass(frozen=True, eq=False)
class UnseenImages:
    """The images of the clients that took no part in training, for new partitions."""

    model: TrainedModel

    @cached_property
    def known(self) -> Embedded:
        """Training and validation images of unseen clients, embedded."""
        indices = [part.train for part in self._parts]
        indices += [part.validation for part in self._parts]
        return embed(self.model, self.model.dataset.train, _joined(indices))

    @cached_property
    def test(self) -> Embedded:
        """Test images of unseen clients, embedded."""
        indices = _joined([part.test for part in self._parts])
        return embed(self.model, self.model.dataset.test, indices)

    @property
    def num_clients(self) -> int:
        """Number of clients that took no part in training."""
        return len(self._parts)

    @property
    def num_known(self) -> int:
        """Number of their training and validation images."""
        return sum(len(part.train) + len(part.validation) for part in self._parts)

    def require_clients(self, num_clients: int) -> None:
        """Raise if there are too few images for the new clients."""
        if self.num_clients == 0:
            raise RunError(
                "all clients took part in training, expected some unseen clients: "
                "the new clients get their images; run with --set "
                "partition.unseen_fraction=0.2"
            )
        if all(len(part.test) == 0 for part in self._parts):
            raise RunError(
                f"found no test images at the {self.num_clients} unseen clients; run "
                "with a larger partition.unseen_fraction"
            )
        if num_clients > self.num_known:
            raise RunError(
                f"found {num_clients} clients, expected at most {self.num_known}, the "
                "training images of the unseen clients; give fewer clients"
            )

    def partition(
        self, num_clients: int, alpha: float, key: RandomKey
    ) -> tuple[NewClient, ...]:
        """Partition all images over new clients, by a Dirichlet draw for each label."""
        settings = DirichletSettings(num_clients=num_clients, alpha=alpha)
        labels = self.known.labels.numpy(), self.test.labels.numpy()
        # "deal" is the name of the random key, so it fixes the numbers of a seed.
        drawn = dirichlet(*labels, settings, key.child("deal"))
        orders = (
            key.child("order", number).numpy().permutation(known)
            for number, known in enumerate(drawn.train)
        )
        return tuple(
            NewClient(
                self.known.at(torch.from_numpy(known)),
                self.test.at(torch.from_numpy(test)),
            )
            for known, test in zip(orders, drawn.test, strict=True)
        )

    @property
    def _parts(self) -> tuple[ClientPart, ...]:
        clients = self.model.partition.clients
        return tuple(client for client in clients if not client.seen)


def _joined(parts: list[Integers]) -> Integers:
    """Return the unique indices, ascending, since clients may share test images."""
    return np.unique(np.concatenate(parts))


@dataclass(frozen=True, eq=False)
class NewClientService:
    """Serving of new clients with a memory of all their images."""

    head: Apply  # embeddings (n, p) -> probabilities of the global model (n, c)
    knn: KnnSettings
    validation_fraction: float  # fraction of images on which a client chooses λ, [0, 1)

    @classmethod
    def of(cls, model: TrainedModel) -> "NewClientService":
        """Build the service with the settings of a run."""
        partition = model.experiment.partition.settings
        fraction = 0.2
        if isinstance(partition, PartitionSettings):
            fraction = partition.validation_fraction
        return cls(model.head, knn_settings(model.experiment), fraction)

    def predictor(self, client: NewClient, num_known: int) -> KnnPredictor:
        """Build the predictor of a client with the first ``num_known`` of its images.

        λ is chosen on a part of them with the others in the store, then all are stored,
        as in `knnper.strategies.knn_per.knn_predictor`. Test images are not used. The
        predictor takes embeddings (n, p) in place of images.
        """
        known = client.known.first(num_known)
        # At least one image stays in the store.
        count = int(self.validation_fraction * num_known + 0.5)
        count = min(count, max(num_known - 1, 0))
        num_classes, dim = known.probabilities.shape[1], known.embeddings.shape[1]
        store = empty_memory_store(StoreSpec(num_classes), dim, UNNAMED)
        tuned = fill_and_tune(
            store,
            NewExamples(known.embeddings[count:], known.labels[count:]),
            NewExamples(known.embeddings[:count], known.labels[:count]),
            self.head,
            self.knn,
        )
        return tuned.predictor(
            lambda embeddings: embeddings, self.head, store, self.knn
        )


def count_correct(predictor: KnnPredictor, client: NewClient) -> int:
    """Count the test images of a client that its predictor classifies correctly."""
    test = client.test
    return evaluate(predictor, Examples(test.embeddings, test.labels)).num_correct


def count_correct_with_each(
    client: NewClient, num_known: int, knn: KnnSettings, choices: ParameterGrid
) -> Tensor:
    """Count correct test images for each λ, k and σ, for curves rather than a choice.

    The first ``num_known`` images are in the store; with none, the client serves the
    global model for any λ. Returns float64 of the choices' `shape`.
    """
    known, test = client.known.first(num_known), client.test
    if num_known == 0:
        return torch.full(choices.shape, test.num_correct(), dtype=torch.float64)
    queries = Queries(test.embeddings, test.probabilities, test.labels)
    evidence = held_out(known.store(), queries, max(choices.num_neighbors))
    return score(evidence, choices, KERNELS[knn.kernel], num_correct)


def size_at(num_known: int, capacity: float) -> int:
    """Return the number of images that fit, rounded, at most all."""
    return min(num_known, int(capacity * num_known + 0.5))
