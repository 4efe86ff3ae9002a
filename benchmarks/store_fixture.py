"""Made-up examples for the benchmarks of the store."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from knnper.datastore.examples import InputLayout, NewExamples, StoreSpec
from knnper.datastore.store import Store, create_store
from knnper.seeding import RandomKey

IMAGE = (32, 32, 3)
NUM_CLASSES = 10
MODEL = "made-up"


def made_up(count: int, dim: int, seed: int = 0) -> NewExamples:
    """Return random images of 3,072 bytes, with embeddings of ``dim`` numbers."""
    generator = RandomKey(seed, ("benchmark",)).numpy()
    embeddings = generator.standard_normal((count, dim), dtype="float32")
    images = generator.integers(0, 256, (count, *IMAGE), dtype="uint8")
    labels = generator.integers(0, NUM_CLASSES, count)
    return NewExamples(
        torch.from_numpy(embeddings), torch.from_numpy(labels), torch.from_numpy(images)
    )


def part(examples: NewExamples, start: int, stop: int) -> NewExamples:
    """Return some of the examples."""
    assert examples.inputs is not None, "made_up gives them"
    rows = slice(start, stop)
    return NewExamples(
        examples.embeddings[rows], examples.labels[rows], examples.inputs[rows]
    )


@contextlib.contextmanager
def store_folder(parent: Path | None) -> Iterator[Path]:
    """Give a folder for a store, on the disk that ``parent`` is on; remove it after."""
    folder = Path(tempfile.mkdtemp(prefix="knnper-store-", dir=parent))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder)


def empty_store(folder: Path, dim: int) -> Store:
    """Return a new store on disk that keeps images and embeddings."""
    spec = StoreSpec(NUM_CLASSES, InputLayout(IMAGE))
    return create_store(folder, spec, dim, MODEL)
