"""A watcher that remembers what it is told."""

import contextlib
from collections.abc import Iterator

from knnper.server.observer import Observer
from knnper.simulation.batches.progress import Advance, Progress
from papers.figures import OnPart
from papers.reproduce import File


class QuietWatcher:
    """Remembers the files that began, those that failed, and what was made."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, str]] = []
        self.failed: dict[str, str] = {}
        self.num_made = 0
        self.num_trained = 0

    def begins(self, number: int, total: int, file: File) -> None:
        self.begun.append((number, total, file.name))

    def fails(self, file: File, reason: str) -> None:
        self.failed[file.name] = reason

    @contextlib.contextmanager
    def counting(self, total: int, noun: str) -> Iterator[Advance]:
        before = self.num_made

        def advance(progress: Progress) -> None:
            self.num_made = before + progress.done - progress.found

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
