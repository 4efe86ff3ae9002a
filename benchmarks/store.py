"""Opening a store on disk, adding to it, and querying it.

Opening: seconds for a store with a valid cache, whose index is read and its checksum
verified. The baseline builds a FAISS index from the embeddings in the same database, as
after the loss of the cache.

Adding: examples per second that are stored durably, singly and in batches of 1,000;
images and embeddings exist before. The baseline appends the same bytes to a plain file
with the same number of fsyncs: the limit of the disk.

Querying: seconds of one query for the ten nearest examples, as a multiple of a bare
`IndexFlatL2` in one thread with the same numbers. The store's answers are exact in
float64, with labels, in a defined order of ties, and include changes by other
processes.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import faiss
import torch
from torch import Tensor

from benchmarks.measurement import (
    Measurement,
    Turns,
    in_turn,
    make_parser,
    rounded,
    say,
    seconds_of,
)
from knnper.datastore.examples import InputLayout, NewExamples, StoreSpec
from knnper.datastore.store import INDEX, Store, StoreReader, create_store, open_store
from knnper.seeding import RandomKey

IMAGE = (32, 32, 3)
NUM_CLASSES = 10
DIM = 1280
AT_ONCE = 1000
NUM_NEIGHBORS = 10


def made_up(count: int, seed: int = 0) -> NewExamples:
    """Return random images of 3,072 bytes, with embeddings of 1,280 numbers."""
    generator = RandomKey(seed, ("benchmark",)).numpy()
    embeddings = generator.standard_normal((count, DIM), dtype="float32")
    images = generator.integers(0, 256, (count, *IMAGE), dtype="uint8")
    labels = generator.integers(0, NUM_CLASSES, count)
    return NewExamples(
        torch.from_numpy(embeddings), torch.from_numpy(labels), torch.from_numpy(images)
    )


@contextlib.contextmanager
def store_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a folder for a store on the disk of ``parent``; remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="knnper-store-", dir=parent))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder)


def empty_store(folder: Path) -> Store:
    """Create a store on disk with images and embeddings."""
    spec = StoreSpec(NUM_CLASSES, InputLayout(IMAGE))
    return create_store(folder, spec, DIM, "made-up")


def opening(num_examples: int, repetitions: int, parent: Path | None) -> Measurement:
    """Measure the seconds of each opening; files are in the system's cache."""
    with store_folder(parent) as folder:
        say("store_opening_s: filling the store")
        with empty_store(folder) as store:
            for start in range(0, num_examples, AT_ONCE):
                count = min(AT_ONCE, num_examples - start)
                store.add(made_up(count, seed=start))
        index, aside = folder / INDEX, folder.with_name("kept")

        def opened() -> None:
            with open_store(folder) as store:
                assert len(store) == num_examples

        def opened_without_index() -> float:
            shutil.move(index, aside)
            seconds = seconds_of(opened)
            shutil.move(aside, index)
            return seconds

        turns = in_turn(lambda: seconds_of(opened), opened_without_index, repetitions)
    details: dict[str, object] = {"examples": num_examples, "embedding_dim": DIM}
    baseline_is = "seconds without the cached index"
    return Measurement(
        "store_opening_s", turns.values, turns.baselines, baseline_is, details
    )


def adding(
    at_once: int, num_examples: int, repetitions: int, parent: Path | None
) -> Measurement:
    """Measure examples per second; the store grows with each repetition."""
    examples = made_up(num_examples)
    new = [
        _part(examples, slice(start, start + at_once))
        for start in range(0, num_examples, at_once)
    ]
    with store_folder(parent) as folder, empty_store(folder) as store:

        def add_to_store() -> float:
            say(f"store_adds_per_s: {len(store)} stored")
            return seconds_of(lambda: [store.add(batch) for batch in new])

        def append_to_file() -> float:
            return seconds_of(lambda: _append(folder.parent / "plain", new))

        turns = in_turn(add_to_store, append_to_file, repetitions)
    return Measurement(
        "store_adds_per_s",
        [num_examples / seconds for seconds in turns.values],
        [num_examples / seconds for seconds in turns.baselines],
        "examples a second, appended to a plain file with fsync",
        {"at_once": at_once, "examples": num_examples, "embedding_dim": DIM},
    )


def _part(examples: NewExamples, rows: slice) -> NewExamples:
    assert examples.inputs is not None, "made_up gives them"
    return NewExamples(
        examples.embeddings[rows], examples.labels[rows], examples.inputs[rows]
    )


def _append(path: Path, new: list[NewExamples]) -> None:
    """Append the bytes of each batch to a file, each with an fsync."""
    with path.open("ab", buffering=0) as file:
        for batch in new:
            assert batch.inputs is not None, "made_up gives them"
            file.write(batch.inputs.numpy().tobytes())
            file.write(batch.embeddings.numpy().tobytes())
            os.fsync(file.fileno())


def asking(
    num_examples: int, num_queries: int, repetitions: int, parent: Path | None
) -> Measurement:
    """Measure the time of a query of a store as a multiple of that of bare FAISS.

    Store and FAISS answer each query in turn. Otherwise the vectors of one of them
    would stay in the processor's cache, which changes the time of a scan by a third.
    """
    say(f"store_query_vs_faiss: {num_examples} stored")
    examples = made_up(num_examples)
    queries = made_up(num_queries, seed=1).embeddings
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(DIM)
    index.add(examples.embeddings.numpy())
    with store_folder(parent) as folder:
        with empty_store(folder) as store:
            store.add(examples)
        with open_store(folder) as reader:
            pairs = [
                _seconds_of_both(reader, index, queries) for _ in range(repetitions + 1)
            ][1:]
    turns = Turns(
        [store_seconds for store_seconds, _ in pairs], [bare for _, bare in pairs]
    )
    details: dict[str, object] = {
        "examples": num_examples,
        "embedding_dim": DIM,
        "ms_a_query": rounded(1000 * statistics.median(turns.values) / num_queries),
    }
    return Measurement(
        "store_query_vs_faiss",
        turns.ratios(),
        [seconds / num_queries for seconds in turns.baselines],
        "seconds a query of faiss.IndexFlatL2",
        details,
    )


def _seconds_of_both(
    store: StoreReader, index: faiss.IndexFlatL2, queries: Tensor
) -> tuple[float, float]:
    """Measure the seconds of all queries for the store and for FAISS."""
    store_seconds = bare = 0.0
    for query in queries:
        rows, numbers = query[None], query[None].numpy()
        began = time.perf_counter()
        store.search(rows, NUM_NEIGHBORS)
        between = time.perf_counter()
        index.search(numbers, NUM_NEIGHBORS)
        store_seconds += between - began
        bare += time.perf_counter() - between
    return store_seconds, bare


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument(
        "--examples", type=int, default=50_000, help="of what is opened"
    )
    parser.add_argument("--singles", type=int, default=300, help="added one by one")
    parser.add_argument("--batches", type=int, default=10, help="added, of 1,000 each")
    parser.add_argument(
        "--asked", type=int, default=5000, help="stored where it is asked"
    )
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parser


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    times, place = options.repetitions, options.folder
    print(opening(options.examples, times, place).as_json(), flush=True)
    for at_once, count in ((1, options.singles), (AT_ONCE, AT_ONCE * options.batches)):
        print(adding(at_once, count, times, place).as_json(), flush=True)
    # More repetitions, since the placement in memory makes runs differ.
    print(asking(options.asked, options.queries, 3 * times, place).as_json())


if __name__ == "__main__":
    main()
