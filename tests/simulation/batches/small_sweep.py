"""Sweeps on digits, small enough for seconds, made without worker processes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from knnper.simulation.batches.family import (
    Event,
    Family,
    make_runs,
)
from knnper.simulation.batches.progress import FamilyEvent
from knnper.simulation.batches.sweep import (
    Sweep,
    read_sweep,
)
from knnper.yaml_text import dump_yaml

PARTITION = {
    "name": "dirichlet",
    "num_clients": 5,
    "alpha": 0.3,
    "unseen_fraction": 0.4,
    "used_fraction": 0.3,
}
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": PARTITION,
    "model": {"name": "tiny_cnn", "embedding_dim": 4},
    "training": {"num_rounds": 2, "batch_size": 16, "learning_rate": 0.1},
    "method": {"name": "knn_per"},
}
Made = list[tuple[Path, int]]  # folders of runs, with the rounds that each had
WORKERS = "knnper.simulation.batches.runner.run_in_workers"
NEIGHBORS = "personalization.num_neighbors"
FRACTION = "partition.unseen_train_fraction"


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "base": BASE,
        "grid": {NEIGHBORS: [1, 5]},
        "seeds": [1, 2],
        **changes,
    }


def read(folder: Path, *overrides: str, **changes: Any) -> Sweep:
    path = folder / "small.yaml"
    path.write_text(dump_yaml(document(**changes)))
    return read_sweep(path, overrides)


def in_this_process(
    families: Sequence[Family], num_workers: int
) -> Iterator[Sequence[FamilyEvent]]:
    """Stand in for `run_in_workers`, whose processes take seconds to start."""
    for number, family in enumerate(families):
        events = list[Event]()
        make_runs(family, events.append)
        yield [(number, event) for event in events]


def ignore(progress: object) -> None:
    """Want to know nothing of how a batch gets on."""


def rounds(made: Sequence[tuple[Path, int]]) -> list[int]:
    """Return how many rounds each run had when it was made."""
    return [number for _, number in made]
