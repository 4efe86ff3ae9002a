"""Seconds to open a store of 50,000 examples with 1,280 numbers each.

With a valid cache: the index is read and its checksum verified. The baseline builds a
FAISS index from the same embeddings in the same database, as where the cache is lost.
"""

import argparse
import shutil
from pathlib import Path

from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement, in_turn, seconds_of
from benchmarks.store_fixture import empty_store, made_up, store_folder
from knnper.datastore.store import INDEX, open_store

AT_ONCE = 1000


def measure(
    num_examples: int, dim: int, repetitions: int, parent: Path | None
) -> Measurement:
    """Return the seconds of each opening; files are in the system's cache."""
    with store_folder(parent) as folder:
        say("store_opening_s: filling the store")
        with empty_store(folder, dim) as store:
            for start in range(0, num_examples, AT_ONCE):
                count = min(AT_ONCE, num_examples - start)
                store.add(made_up(count, dim, seed=start))
        index, kept = folder / INDEX, folder.with_name("kept")

        def opened() -> None:
            with open_store(folder) as store:
                assert len(store) == num_examples

        def opened_without_index() -> float:
            shutil.move(index, kept)
            seconds = seconds_of(opened)
            shutil.move(kept, index)
            return seconds

        turns = in_turn(lambda: seconds_of(opened), opened_without_index, repetitions)
    details: dict[str, object] = {"examples": num_examples, "embedding_dim": dim}
    baseline_is = "seconds without the cached index"
    return Measurement("store_opening_s", turns.ours, turns.bare, baseline_is, details)


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=1280)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parser


def main() -> None:
    """Measure and print."""
    given = parser().parse_args()
    figures = measure(given.examples, given.dim, given.repetitions, given.folder)
    print(figures.as_json())


if __name__ == "__main__":
    main()
