"""One kind of index, measured on a client's own examples."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datastore.contents import Contents, Ids
from datastore.core.rows import Version
from datastore.core.view import ReadVectors, View
from datastore.index.base import Vectors
from datastore.index.catalogue import INDEX_KINDS, IndexSettings, build_index
from datastore.index.quantized import LearningIndex
from datastore.index.settings import LossySettings
from datastore.neighbors import Neighbors
from datastore.prediction.kernel import KERNELS, KernelName
from datastore.prediction.vote import neighbor_vote
from datastore.tuning.candidates import candidates
from datastore.tuning.choice import choose
from datastore.tuning.evidence import Queries, held_out
from datastore.tuning.scores import CRITERIA, num_correct

MOST_TIMED = 50
RERANK = 4
KNN_WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The λ that are tried: those of the paper, section 5."""

Head = Callable[[Tensor], Tensor]
"""From embeddings (n, p) to the global model's probabilities (n, c)."""


@dataclass(frozen=True)
class AdviceSettings:
    """How the neighbours vote.

    Attributes
    ----------
    num_neighbors
        k.
    kernel
        A name of `datastore.prediction.kernel.KERNELS`.
    kernel_scale
        σ.
    seed
        Of the split.
    """

    num_neighbors: int = 10
    kernel: KernelName = "paper"
    kernel_scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """Some examples: ids, labels and embeddings (n, p)."""

    contents: Contents
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def embeddings(self) -> Tensor:
        """φ(x), float32 of shape (n, p)."""
        return torch.from_numpy(self.vectors)

    @property
    def labels(self) -> Tensor:
        """int64, shape (n,)."""
        return torch.from_numpy(self.contents.labels)


@dataclass(frozen=True)
class Trial:
    """What was measured of one kind of index.

    Attributes
    ----------
    title
        Its name, and whether it ranks anew.
    settings
        Of the index.
    knn_accuracy
        Of the neighbours' vote.
    mixed_accuracy, knn_weight
        Of its mixture with the global model, and λ; None without that.
    recall
        Share of the k nearest that are found.
    example_bytes
        What the index takes for one example.
    query_ms
        Median time of one query.
    build_s
        Time to build it.
    has_learnt
        Whether it is what it will be; a kind that learns how to make vectors smaller
        keeps them as they are while there are too few.
    """

    title: str
    settings: IndexSettings
    knn_accuracy: float
    mixed_accuracy: float | None
    knn_weight: float | None
    recall: float
    example_bytes: float
    query_ms: float
    build_s: float
    has_learnt: bool = True

    @property
    def accuracy(self) -> float:
        """Of what the client would serve."""
        mixed = self.mixed_accuracy
        return self.knn_accuracy if mixed is None else mixed


def all_kinds() -> Iterator[tuple[str, IndexSettings]]:
    """Yield each kind with its default values, and lossy ones with re-ranking too."""
    for name, kind in INDEX_KINDS.items():
        plain: IndexSettings = kind.settings_type()
        yield name, plain
        if issubclass(kind.settings_type, LossySettings):
            again: IndexSettings = kind.settings_type(rerank=RERANK)
            yield f"{name}, rerank {RERANK}", again


@dataclass(frozen=True)
class Trials:
    """The examples on which all kinds are measured.

    Attributes
    ----------
    stored
        In the index.
    asked
        Looked up in it.
    tuned
        Looked up to choose λ; used where there is a ``head``.
    num_classes
        c.
    settings
        How the neighbours vote.
    version
        Whose embeddings these are.
    read_vectors
        Reads embeddings from where the store keeps them.
    head
        The global model; None leaves the mixture out.
    """

    stored: Part
    asked: Part
    tuned: Part
    num_classes: int
    settings: AdviceSettings
    version: Version
    read_vectors: ReadVectors
    head: Head | None

    def measure(self, title: str, settings: IndexSettings, nearest: Ids) -> Trial:
        """Return what one kind achieves.

        Parameters
        ----------
        title
            Its name.
        settings
            Of the kind.
        nearest
            Ids of the nearest of each query, as `nearest` returns them.
        """
        start = time.perf_counter()
        view, num_bytes = self._view(settings)
        build_s = time.perf_counter() - start
        found = view.search(self.asked.embeddings, self.settings.num_neighbors)
        votes = self._votes(found)
        knn_weight = None if self.head is None else self._knn_weight(view, self.head)
        return Trial(
            title,
            settings,
            self._accuracy(votes, 1.0),
            None if knn_weight is None else self._accuracy(votes, knn_weight),
            knn_weight,
            recall(found.ids.numpy(), nearest),
            num_bytes / len(self.stored),
            self._query_ms(view),
            build_s,
            not isinstance(view.index, LearningIndex) or view.index.has_learnt,
        )

    def nearest(self, settings: IndexSettings) -> Ids:
        """Return the ids of the k nearest of each query, shape (m, k or less)."""
        view, _ = self._view(settings)
        found = view.search(self.asked.embeddings, self.settings.num_neighbors)
        return found.ids.numpy()

    def global_accuracy(self) -> float | None:
        """Return that of the global model alone; None without it."""
        if self.head is None:
            return None
        nothing = torch.zeros((len(self.asked), self.num_classes))
        return self._accuracy(nothing, 0.0)

    def _view(self, settings: IndexSettings) -> tuple[View, int]:
        ids, vectors = self.stored.contents.ids, self.stored.vectors
        index = build_index(settings, vectors.shape[1], ids, vectors)
        view = View(
            index, self.stored.contents, settings, self.version, self.read_vectors
        )
        return view, index.num_bytes

    def _votes(self, found: Neighbors) -> Tensor:
        log_weights = KERNELS[self.settings.kernel](
            found.squared_distances,
            self.settings.kernel_scale,
            self.stored.vectors.shape[1],
        )
        return neighbor_vote(log_weights, found.labels, self.num_classes)

    def _knn_weight(self, view: View, head: Head) -> float:
        count, scale = self.settings.num_neighbors, self.settings.kernel_scale
        known = self.tuned
        queries = Queries(known.embeddings, head(known.embeddings), known.labels)
        choice = choose(
            held_out(view, queries, count),
            candidates(KNN_WEIGHTS, (count,), (scale,)),
            KERNELS[self.settings.kernel],
            CRITERIA["accuracy"],
        )
        return choice.knn_weight

    def _accuracy(self, votes: Tensor, knn_weight: float) -> float:
        probabilities = votes if self.head is None else self.head(self.asked.embeddings)
        weights = torch.tensor([knn_weight], dtype=torch.float64)
        correct = num_correct(votes, probabilities, self.asked.labels, weights)
        return float(correct[0]) / len(self.asked)

    def _query_ms(self, view: View) -> float:
        seconds = []
        for query in self.asked.embeddings[:MOST_TIMED]:
            start = time.perf_counter()
            view.search(query[None], self.settings.num_neighbors)
            seconds.append(time.perf_counter() - start)
        return 1000 * statistics.median(seconds)


def recall(found: Ids, nearest: Ids) -> float:
    """Return the share of ``nearest`` (m, r) that is in the same row of ``found``."""
    hits = (found[:, :, None] == nearest[:, None, :]).any(axis=1)
    return float(np.mean(hits))
