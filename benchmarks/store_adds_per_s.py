"""Examples a second that are stored durably: one by one, and 1,000 at once.

Each has an image of 3,072 bytes and an embedding of 1,280 numbers, made beforehand. The
baseline appends the same bytes to a plain file and waits until they are on disk, as
often: what the disk allows.
"""

import argparse
import os
from pathlib import Path

from benchmarks.command import make_parser, say
from benchmarks.measurement import Measurement, in_turn, seconds_of
from benchmarks.store_fixture import empty_store, made_up, part, store_folder
from knnper.datastore.examples import NewExamples


def batches(examples: NewExamples, at_once: int) -> list[NewExamples]:
    """Return the examples in batches of ``at_once``."""
    return [
        part(examples, start, start + at_once)
        for start in range(0, len(examples), at_once)
    ]


def append(path: Path, new: list[NewExamples]) -> None:
    """Append the bytes of each batch to a file, and bring them to disk."""
    with path.open("ab", buffering=0) as file:
        for batch in new:
            assert batch.inputs is not None, "made_up gives them"
            file.write(batch.inputs.numpy().tobytes())
            file.write(batch.embeddings.numpy().tobytes())
            os.fsync(file.fileno())


def measure(
    at_once: int, num_examples: int, dim: int, repetitions: int, parent: Path | None
) -> Measurement:
    """Return examples a second; the store grows from one repetition to the next."""
    new = batches(made_up(num_examples, dim), at_once)
    with store_folder(parent) as folder, empty_store(folder, dim) as store:

        def ours() -> float:
            say(f"store_adds_per_s: {len(store)} stored")
            return seconds_of(lambda: [store.add(batch) for batch in new])

        def bare() -> float:
            return seconds_of(lambda: append(folder.parent / "plain", new))

        turns = in_turn(ours, bare, repetitions)
    return Measurement(
        "store_adds_per_s",
        [num_examples / seconds for seconds in turns.ours],
        [num_examples / seconds for seconds in turns.bare],
        "examples a second, appended to a plain file with fsync",
        {"at_once": at_once, "examples": num_examples, "embedding_dim": dim},
    )


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = make_parser(__doc__, repetitions=5)
    parser.add_argument("--singles", type=int, default=300, help="added one by one")
    parser.add_argument("--batches", type=int, default=10, help="of 1,000")
    parser.add_argument("--dim", type=int, default=1280)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parser


def main() -> None:
    """Measure and print, a line for each size of a batch."""
    given = parser().parse_args()
    for at_once, count in ((1, given.singles), (1000, 1000 * given.batches)):
        figures = measure(at_once, count, given.dim, given.repetitions, given.folder)
        print(figures.as_json())


if __name__ == "__main__":
    main()
