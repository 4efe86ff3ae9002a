"""Seconds of one query, as a multiple of FAISS alone.

A store of 5,000 examples with 1,280 numbers each, on disk, is asked for the ten nearest
of one query at a time; so is a bare `IndexFlatL2` in one thread with the same numbers.
The store's answers are exact in float64, with labels, ties in order, and up to date
with what other processes have changed.
"""

import argparse
from pathlib import Path

import faiss

from benchmarks.command import make_parser
from benchmarks.measurement import Measurement, in_turn, seconds_of
from benchmarks.store_fixture import empty_store, made_up, store_folder
from datastore.folder import open_store

NUM_NEIGHBORS = 10


def measure(
    num_examples: int,
    dim: int,
    num_queries: int,
    repetitions: int,
    parent: Path | None,
) -> Measurement:
    """Return the ratio of each repetition: all queries to both, one after the other."""
    examples = made_up(num_examples, dim)
    queries = made_up(num_queries, dim, seed=1).embeddings
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(dim)
    index.add(examples.embeddings.numpy())
    with store_folder(parent) as folder:
        with empty_store(folder, dim) as store:
            store.add(examples)
        with open_store(folder) as reader:

            def ours() -> None:
                for query in queries:
                    reader.search(query[None], NUM_NEIGHBORS)

            def bare() -> None:
                for query in queries.numpy():
                    index.search(query[None], NUM_NEIGHBORS)

            turns = in_turn(
                lambda: seconds_of(ours), lambda: seconds_of(bare), repetitions
            )
    details: dict[str, object] = {
        "examples": num_examples,
        "embedding_dim": dim,
        "ms_a_query": 1000 * min(turns.ours) / num_queries,
    }
    return Measurement(
        "store_query_vs_faiss",
        turns.ratios(),
        [seconds / num_queries for seconds in turns.bare],
        "seconds a query of faiss.IndexFlatL2",
        details,
    )


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
