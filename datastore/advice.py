"""Which kind of index suits a client, measured on its own examples."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knnper.datastore.database import Rows, Version
from knnper.datastore.examples import Contents, Ids, Neighbors
from knnper.datastore.index import LossySettings, Vectors
from knnper.datastore.index_kinds import (
    INDEX_KINDS,
    FlatSettings,
    IndexSettings,
    LearningIndex,
)
from knnper.datastore.prediction import KERNELS, KernelName, neighbor_vote
from knnper.datastore.search import VectorsOf, View
from knnper.datastore.tuning import (
    CRITERIA,
    Queries,
    candidates,
    choose,
    held_out,
    num_correct,
)
from knnper.seeding import RandomKey

MOST_TIMED = 50

RERANK = 4

KNN_WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The λ that are tried: those of the paper, section 5."""

Head = Callable[[Tensor], Tensor]
"""From embeddings (n, p) to the global model's probabilities (n, c)."""


@dataclass(frozen=True)
class AdviceSettings:
    """How the neighbours vote."""

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
    """What was measured of one kind of index."""

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
        plain: IndexSettings = kind()
        yield name, plain
        if issubclass(kind, LossySettings):
            again: IndexSettings = kind(rerank=RERANK)
            yield f"{name}, rerank {RERANK}", again


@dataclass(frozen=True)
class Trials:
    """The examples on which all kinds are measured."""

    stored: Part
    asked: Part
    tuned: Part
    num_classes: int
    settings: AdviceSettings
    version: Version
    read_vectors: VectorsOf
    head: Head | None

    def measure(self, title: str, settings: IndexSettings, nearest: Ids) -> Trial:
        """Return what one kind achieves."""
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
        index = settings.build(vectors.shape[1], ids, vectors)
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


FEWEST = 10
"""Nothing can be measured with fewer examples."""

ASKED_SHARE, TUNED_SHARE = 0.2, 0.1
"""Parts of the examples that are looked up, and that λ is chosen on."""

MOST_ASKED = 1000
"""Enough to tell half a point of accuracy apart."""

TOLERANCE = 0.005
"""What an index may cost: half a point of accuracy."""

SMALL_BYTES = 16e6
"""A flat index of fewer bytes is not worth another."""


@dataclass(frozen=True)
class Advice:
    """What was measured, and what follows."""

    num_examples: int
    num_indexed: int
    num_asked: int
    global_accuracy: float | None
    trials: tuple[Trial, ...]
    recommended: str
    reason: str


def advise(
    rows: Rows,
    num_classes: int,
    settings: AdviceSettings,
    head: Head | None = None,
    on_start: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Advice:
    """Measure every kind of index on a split of the stored examples."""
    with rows.reading():
        contents, active = rows.contents(), rows.head().active
        if len(contents) < FEWEST:
            return _too_few(len(contents))
        vectors = rows.vectors(contents.ids, active.number)
        tuned_share = 0.0 if head is None else TUNED_SHARE
        stored, asked, tuned = _split(contents, vectors, tuned_share, settings.seed)
        trials = Trials(
            stored,
            asked,
            tuned,
            num_classes,
            settings,
            active,
            lambda ids: rows.vectors(ids, active.number),
            head,
        )
        kinds = list(all_kinds())
        on_start(len(kinds))
        measured = tuple(_measured(trials, kinds, on_progress))
    recommended, reason = recommend(measured, len(contents))
    return Advice(
        len(contents),
        len(stored),
        len(asked),
        trials.global_accuracy(),
        measured,
        recommended,
        reason,
    )


def recommend(trials: Sequence[Trial], num_examples: int) -> tuple[str, str]:
    """Return the title of the best of ``trials``, the flat index first, and why."""
    flat, *_ = trials
    flat_bytes = flat.example_bytes * num_examples
    if flat_bytes <= SMALL_BYTES:
        return flat.title, (
            f"an exact index of all {num_examples} examples takes "
            f"{flat_bytes / 1e6:.1f} MB only"
        )
    good = [one for one in trials if one.accuracy >= flat.accuracy - TOLERANCE]
    best = min(good, key=lambda one: (one.example_bytes, one.query_ms))
    share = 100 * best.example_bytes / flat.example_bytes
    return best.title, (
        f"the fewest bytes ({share:.0f} % of flat) within {100 * TOLERANCE:.1f} points "
        f"of its accuracy ({100 * best.accuracy:.1f} and {100 * flat.accuracy:.1f} %)"
    )


def _measured(
    trials: Trials,
    kinds: Sequence[tuple[str, IndexSettings]],
    on_progress: Callable[[int], None],
) -> Iterator[Trial]:
    nearest = trials.nearest(FlatSettings())
    for title, settings in kinds:
        yield trials.measure(title, settings, nearest)
        on_progress(1)


def _split(
    contents: Contents, vectors: Vectors, tuned_share: float, seed: int
) -> tuple[Part, Part, Part]:
    """Return what is in the indexes, what is looked up, and what λ is chosen on."""
    order = RandomKey(seed, ("advice",)).numpy().permutation(len(contents))
    rank = order.argsort()
    num_asked = min(MOST_ASKED, round(ASKED_SHARE * len(contents)))
    num_tuned = min(MOST_ASKED, round(tuned_share * len(contents)))
    asked = rank < num_asked
    tuned = ~asked & (rank < num_asked + num_tuned)
    stored = ~asked & ~tuned
    parts = (
        Part(contents.take(part), vectors[part]) for part in (stored, asked, tuned)
    )
    in_index, looked_up, left_out = parts
    return in_index, looked_up, left_out


def _too_few(num_examples: int) -> Advice:
    reason = (
        f"{num_examples} examples are stored; at least {FEWEST} are needed to measure "
        "anything, and an exact index of so few is small"
    )
    return Advice(num_examples, 0, 0, None, (), "flat", reason)
