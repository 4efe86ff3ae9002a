"""Seconds of one query, as a multiple of FAISS alone.

A store of 5,000 examples with 1,280 numbers each, on disk, is asked for the ten nearest
of one query at a time; so is a bare `IndexFlatL2` in one thread with the same numbers.
The store's answers are exact in float64, with labels, ties in order, and up to date
with what other processes have changed.
"""

import argparse
import statistics
import time
from pathlib import Path

import faiss
from torch import Tensor

from benchmarks.command import make_parser
from benchmarks.measurement import Measurement, Turns, rounded
from benchmarks.store_fixture import empty_store, made_up, store_folder
from knnper.datastore.store import StoreReader, open_store

NUM_NEIGHBORS = 10


def measure(
    num_examples: int, dim: int, num_queries: int, repetitions: int, parent: Path | None
) -> Measurement:
    """Return the ratio of each repetition: every query is put to both in turn.

    So neither finds its numbers in the processor's cache from the query before, and the
    two are alike: what is in the cache makes a scan faster or slower by a third.
    """
    examples = made_up(num_examples, dim)
    queries = made_up(num_queries, dim, seed=1).embeddings
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(dim)
    index.add(examples.embeddings.numpy())
    with store_folder(parent) as folder:
        with empty_store(folder, dim) as store:
            store.add(examples)
        with open_store(folder) as reader:
            pairs = [
                _seconds_of_both(reader, index, queries) for _ in range(repetitions + 1)
            ][1:]
    turns = Turns([ours for ours, _ in pairs], [bare for _, bare in pairs])
    details: dict[str, object] = {
        "examples": num_examples,
        "embedding_dim": dim,
        "ms_a_query": rounded(1000 * statistics.median(turns.ours) / num_queries),
    }
    return Measurement(
        "store_query_vs_faiss",
        turns.ratios(),
        [seconds / num_queries for seconds in turns.bare],
        "seconds a query of faiss.IndexFlatL2",
        details,
    )


def _seconds_of_both(
    store: StoreReader, index: faiss.IndexFlatL2, queries: Tensor
) -> tuple[float, float]:
    """Return the seconds that all queries take the store, and FAISS."""
    ours = bare = 0.0
    for query in queries:
        rows, numbers = query[None], query[None].numpy()
        began = time.perf_counter()
        store.search(rows, NUM_NEIGHBORS)
        between = time.perf_counter()
        index.search(numbers, NUM_NEIGHBORS)
        ours += between - began
        bare += time.perf_counter() - between
    return ours, bare


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=15)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--dim", type=int, default=1280)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    figures = measure(
        given.examples, given.dim, given.queries, given.repetitions, given.folder
    )
    print(figures.as_json())


if __name__ == "__main__":
    main()
