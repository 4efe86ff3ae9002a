"""Which kind of index suits a client, measured on its own examples."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore.database import Rows, Version
from knnper.datastore.examples import Contents, Ids
from knnper.datastore.index import (
    INDEX_KINDS,
    FlatSettings,
    IndexSettings,
    LossySettings,
    Vectors,
)
from knnper.datastore.memory import PAPER_KNN_WEIGHTS, KnnSettings, ParameterGrid
from knnper.datastore.prediction import KERNELS, neighbor_vote
from knnper.datastore.search import VectorsOf, View
from knnper.datastore.tuning import (
    CRITERIA,
    Queries,
    best_parameters,
    held_out,
    num_correct,
)
from knnper.seeding import RandomKey

MOST_TIMED = 50
RERANK = 4
Head = Callable[[Tensor], Tensor]
"""From embeddings (n, p) to the global model's probabilities (n, c)."""


@dataclass(frozen=True)
class Trial:
    """What was measured of one kind of index."""

    title: str  # its name, and whether it ranks anew
    settings: IndexSettings
    knn_accuracy: float  # of the neighbours' vote
    mixed_accuracy: float | None  # of its mixture with the global model
    knn_weight: float | None  # λ of that
    recall: float  # share of the k nearest that are found
    example_bytes: float  # what the index takes for one example
    query_ms: float  # median of one query
    build_s: float
    # A kind that learns how to make vectors smaller keeps them as they are while there
    # are too few.
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
class _Trials:
    """The examples on which all kinds are measured."""

    stored: Contents  # in the index
    vectors: Vectors  # theirs
    asked: Queries  # looked up in it
    tuned: Queries  # looked up to choose λ
    settings: KnnSettings  # how the neighbours vote
    version: Version
    read_vectors: VectorsOf
    mixes: bool  # whether there is a global model

    def measure(self, title: str, settings: IndexSettings, nearest: Ids) -> Trial:
        """Return what one kind achieves."""
        start = time.perf_counter()
        view = self._view(settings)
        num_bytes, build_s = view.index.num_bytes, time.perf_counter() - start
        count, scale = self.settings.num_neighbors, self.settings.kernel_scale
        kernel = KERNELS[self.settings.kernel]
        found = view.search(self.asked.embeddings, count)
        votes = neighbor_vote(
            kernel(found.squared_distances, scale, self.vectors.shape[1]),
            found.labels,
            self.asked.probabilities.shape[1],
        )
        seconds = []
        for query in self.asked.embeddings[:MOST_TIMED]:
            start = time.perf_counter()
            view.search(query[None], count)
            seconds.append(time.perf_counter() - start)
        knn_weight = None
        if self.mixes:
            knn_weight = best_parameters(
                held_out(view, self.tuned, count),
                ParameterGrid.of(PAPER_KNN_WEIGHTS, (count,), (scale,)),
                kernel,
                CRITERIA["accuracy"],
            ).knn_weight
        return Trial(
            title,
            settings,
            self.accuracy(votes, 1.0),
            None if knn_weight is None else self.accuracy(votes, knn_weight),
            knn_weight,
            recall(found.ids.numpy(), nearest),
            num_bytes / len(self.stored),
            1000 * statistics.median(seconds),
            build_s,
            view.index.has_learnt,
        )

    def nearest(self) -> Ids:
        """Return the ids of the k nearest of each query, shape (m, k or less)."""
        view = self._view(FlatSettings())
        return view.search(
            self.asked.embeddings, self.settings.num_neighbors
        ).ids.numpy()

    def accuracy(self, votes: Tensor, knn_weight: float) -> float:
        """Return that of the mixture of votes (m, c) and the global model."""
        weights = torch.tensor([knn_weight], dtype=torch.float64)
        asked = self.asked
        correct = num_correct(votes, asked.probabilities, asked.labels, weights)
        return float(correct[0]) / len(asked)

    def _view(self, settings: IndexSettings) -> View:
        index = settings.build(self.vectors.shape[1], self.stored.ids, self.vectors)
        return View(index, self.stored, settings, self.version, self.read_vectors)


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
    global_accuracy: float | None  # of the global model alone
    trials: tuple[Trial, ...]  # the flat index first; none where there is too little
    recommended: str  # title of a trial
    reason: str


def advise(
    rows: Rows,
    num_classes: int,
    settings: KnnSettings,
    head: Head | None = None,
    on_start: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
    seed: int = 0,
) -> Advice:
    """Measure every kind of index on a split, by ``seed``, of the stored examples."""
    with rows.reading():
        contents, active = rows.contents(), rows.head().active
        if len(contents) < FEWEST:
            reason = (
                f"{len(contents)} examples are stored; at least {FEWEST} are needed to "
                "measure anything, and an exact index of so few is small"
            )
            return Advice(len(contents), 0, 0, None, (), "flat", reason)
        vectors = rows.vectors(contents.ids, active.number)
        tuned_share = 0.0 if head is None else TUNED_SHARE
        asked, tuned = _split(len(contents), tuned_share, seed)
        stored = ~asked & ~tuned

        def queries(chosen: NDArray[np.bool_]) -> Queries:
            embeddings = torch.from_numpy(vectors[chosen])
            even = torch.full((len(embeddings), num_classes), 1 / num_classes)
            seen = even if head is None else head(embeddings)
            labels = torch.from_numpy(contents.labels[chosen])
            return Queries(embeddings, seen, labels)

        trials = _Trials(
            contents.take(stored),
            vectors[stored],
            queries(asked),
            queries(tuned),
            settings,
            active,
            lambda ids: rows.vectors(ids, active.number),
            mixes=head is not None,
        )
        kinds, nearest = list(all_kinds()), trials.nearest()
        on_start(len(kinds))
        measured = list[Trial]()
        for title, kind in kinds:
            measured.append(trials.measure(title, kind, nearest))
            on_progress(1)
    recommended, reason = recommend(measured, len(contents))
    alone = trials.accuracy(torch.zeros_like(trials.asked.probabilities), 0.0)
    return Advice(
        len(contents),
        len(trials.stored),
        len(trials.asked),
        None if head is None else alone,
        tuple(measured),
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


def _split(
    count: int, tuned_share: float, seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which examples are looked up, and on which λ is chosen."""
    order = RandomKey(seed, ("advice",)).numpy().permutation(count)
    rank = order.argsort()
    num_asked = min(MOST_ASKED, round(ASKED_SHARE * count))
    num_tuned = min(MOST_ASKED, round(tuned_share * count))
    asked = rank < num_asked
    return asked, ~asked & (rank < num_asked + num_tuned)
