"""Files on digits, small enough for seconds; a watcher that remembers all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.simulation.batches.progress import (
    Advance,
    Progress,
)
from knnper.simulation.catalogue import experiment_catalogue
from knnper.yaml_text import dump_yaml
from papers.figures import OnPart
from papers.files import File
from papers.reproduce import Watcher

BASE: dict[str, Any] = {
    "name": "base",
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 6,
        "alpha": 0.3,
        "unseen_fraction": 0.34,
        "used_fraction": 0.3,
    },
    "model": {"name": "tiny_cnn", "embedding_dim": 4},
    "training": {"num_rounds": 2, "batch_size": 32},
    "method": {"name": "knn_per"},
    "run": {"engine": "serial"},
}
FIGURE: dict[str, Any] = {
    "name": "weak-and-strong",
    "figure": "memory",
    "base": BASE,
    "options": {"only": ["hardware"], "clients": 3, "partitions": 1},
}
SWEEP: dict[str, Any] = {
    "name": "neighbors",
    "base": BASE,
    "grid": {"personalization.num_neighbors": [1, 5]},
    "seeds": [1, 2],
    "x": "personalization.num_neighbors",
}
COMPARISON: dict[str, Any] = {
    "name": "methods",
    "reference": "mean",
    "seeds": [1],
    "base": {
        **{name: BASE[name] for name in ("data", "partition", "model")},
        "training": {"num_rounds": 1, "batch_size": 64},
    },
    "rows": {
        "mean": {"method": {"name": "fedavg"}},
        "memory": {"method": {"name": "knn_per"}},
    },
}
ABOUT = "# The paper's figure, <small>.\n#\n#   knnper reproduce it.yaml\n"


def experiment(**sections: Any) -> Experiment:
    """Return `BASE` with other sections."""
    return load_experiment({**BASE, **sections}, experiment_catalogue())


def write(folder: Path, document: dict[str, Any], **changes: Any) -> Path:
    """Return a file of its name's with a document, a comment at its top."""
    both = {**document, **changes}
    path = folder / f"{both['name']}.yaml"
    path.write_text(ABOUT + dump_yaml(both))
    return path


def without_data(folder: Path) -> Path:
    """Return the file of a sweep over images that are nowhere."""
    data = {"name": "image_folder", "root": str(folder / "nowhere")}
    return write(folder, SWEEP, name="lost", base={**BASE, "data": data})


def quiet(done: int, total: int) -> None:
    assert done <= total


class QuietWatcher(Watcher):
    """Remembers the files that began, those that failed, and what was made."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, str]] = []
        self.failed: dict[str, str] = {}
        self.num_made = self.num_trained = 0

    def begins(self, number: int, total: int, file: File) -> None:
        self.begun.append((number, total, file.name))

    def fails(self, file: File, reason: str) -> None:
        self.failed[file.name] = reason

    @contextlib.contextmanager
    def counting(self, total: int, noun: str) -> Iterator[Advance]:
        before = self.num_made

        def advance(progress: Progress) -> None:
            self.num_made = before + progress.done - progress.at_start

        yield advance

    @contextlib.contextmanager
    def observing(self) -> Iterator[Observer]:
        watcher = self

        class Counting(Observer):
            def training_started(self, num_rounds: int, first_round: int) -> None:
                watcher.num_trained += 1

        yield Counting()

    @contextlib.contextmanager
    def drawing(self, parts: str) -> Iterator[OnPart]:
        first: list[int] = []

        def on_part(done: int, total: int) -> None:
            self.num_made += done - first[-1] if first else 0
            first.append(done)

        yield on_part
