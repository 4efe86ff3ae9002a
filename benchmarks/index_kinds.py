"""Milliseconds of a query with each kind of index, as a multiple of flat's.

The training images are stored as embeddings and the test images are the queries, k is
10. There is a line for each kind, with the part of the ten nearest that it finds
(recall@10), the share of test images that its neighbours classify correctly, bytes and
seconds to build; in the same run flat has the figures of the baseline.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement, in_turn, rounded, seconds_of
from benchmarks.models import add_run_option, model_and_data
from knnper.data.examples import Dataset, LabelledArrays
from knnper.datastore.examples import Ids
from knnper.datastore.index import (
    INDEX_KINDS,
    FlatSettings,
    IndexSettings,
    ProductSettings,
    VectorIndex,
    Vectors,
)
from knnper.datastore.prediction import neighbor_vote, paper_kernel
from knnper.datastore.search import nearest
from knnper.seeding import RandomKey

NUM_NEIGHBORS = 10
TIMED_QUERIES = 50

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Embedded:
    """Embeddings of images.

    Attributes
    ----------
    vectors, queries
        Of the images that are stored, shape (n, p), and of those asked for, (m, p).
    labels, query_labels
        int64, shapes (n,) and (m,).
    """

    vectors: Vectors
    labels: NDArray[np.int64]
    queries: Vectors
    query_labels: NDArray[np.int64]


@dataclass(frozen=True)
class Built:
    """An index of all that is stored.

    Attributes
    ----------
    settings
        With which it was built.
    index
        The ids are positions.
    seconds
        That took.
    neighbors
        Ids of the nearest of all queries, shape (m, 10).
    accuracy
        Share of the queries that are classified correctly by them.
    """

    settings: IndexSettings
    index: VectorIndex
    seconds: float
    neighbors: Ids
    accuracy: float

    @property
    def bytes_per_vector(self) -> float:
        """Bytes of the whole index for each vector."""
        return self.index.num_bytes / len(self.index)


def measure(
    data: Embedded, kinds: Sequence[IndexSettings], repetitions: int
) -> list[Measurement]:
    """Return a measurement for each of ``kinds``."""
    flat = build(data, FlatSettings())
    return [_compare(data, build(data, kind), flat, repetitions) for kind in kinds]


def build(data: Embedded, settings: IndexSettings) -> Built:
    """Build an index and let it answer all queries."""
    say(f"index_kinds: {settings}")
    ids, dim = np.arange(len(data.vectors)), data.vectors.shape[1]
    made: list[VectorIndex] = []
    seconds = seconds_of(lambda: made.append(settings.build(dim, ids, data.vectors)))
    distances, neighbors = _nearest(data, settings, made[0], data.queries)
    votes = neighbor_vote(
        paper_kernel(torch.from_numpy(distances), 1.0, dim),
        torch.from_numpy(data.labels[neighbors]),
        int(data.labels.max()) + 1,
    )
    accuracy = float((votes.argmax(dim=1).numpy() == data.query_labels).mean())
    return Built(settings, made[0], seconds, neighbors, accuracy)


def recall(found: Ids, expected: Ids) -> float:
    """Return which part of the ids in ``expected`` is in the same row of ``found``."""
    is_there = (expected[:, :, None] == found[:, None, :]).any(axis=2)
    return float(is_there.mean())


def _compare(
    data: Embedded, built: Built, flat: Built, repetitions: int
) -> Measurement:
    turns = in_turn(
        lambda: _seconds_of_queries(data, built),
        lambda: _seconds_of_queries(data, flat),
        repetitions,
    )
    in_ms = 1000 / TIMED_QUERIES
    details: dict[str, object] = {
        "kind": asdict(built.settings),
        "recall_at_10": rounded(recall(built.neighbors, flat.neighbors)),
        "accuracy": rounded(built.accuracy),
        "baseline_accuracy": rounded(flat.accuracy),
        "bytes_per_vector": rounded(built.bytes_per_vector),
        "baseline_bytes_per_vector": rounded(flat.bytes_per_vector),
        "build_seconds": rounded(built.seconds),
        "milliseconds": rounded(statistics.median(turns.ours) * in_ms),
        "vectors": len(data.vectors),
        "queries": len(data.queries),
    }
    return Measurement(
        "index_kinds",
        turns.ratios(),
        [seconds * in_ms for seconds in turns.bare],
        "milliseconds of a query with flat",
        details,
    )


def _seconds_of_queries(data: Embedded, built: Built) -> float:
    """Return the seconds of some queries, one at a time."""

    def ask() -> None:
        for row in range(min(TIMED_QUERIES, len(data.queries))):
            _nearest(data, built.settings, built.index, data.queries[row : row + 1])

    return seconds_of(ask)


def _nearest(
    data: Embedded, settings: IndexSettings, index: VectorIndex, queries: Vectors
) -> tuple[NDArray[np.float64], Ids]:
    return nearest(
        queries, index, settings, NUM_NEIGHBORS, lambda ids: data.vectors[ids]
    )


def embed_dataset(dataset: Dataset, embed: Embed, num_queries: int) -> Embedded:
    """Embed the training images, and the first of the test images, in random order."""
    say("index_kinds: embedding")
    vectors, labels = _embed_split(dataset.train, embed, len(dataset.train))
    queries, query_labels = _embed_split(dataset.test, embed, num_queries)
    return Embedded(vectors, labels, queries, query_labels)


def _embed_split(
    split: LabelledArrays, embed: Embed, count: int
) -> tuple[Vectors, NDArray[np.int64]]:
    order = RandomKey(0).child("order").numpy().permutation(len(split))[:count]
    embeddings: Vectors = embed(torch.from_numpy(split.images[order])).numpy()
    return embeddings, np.array(split.labels[order])


def kinds_to_compare() -> list[IndexSettings]:
    """Return all but flat with their default values, and PQ with re-ranking."""
    kinds = [kind() for name, kind in INDEX_KINDS.items() if name != "flat"]
    return [*kinds, ProductSettings(rerank=4)]


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    add_run_option(parser)
    parser.add_argument("--queries", type=int, default=2000)
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    torch.set_num_threads(1)
    model = model_and_data(given.run, given.images)
    data = embed_dataset(model.dataset, model.embed, given.queries)
    for measurement in measure(data, kinds_to_compare(), given.repetitions):
        print(measurement.as_json(), flush=True)


if __name__ == "__main__":
    main()
