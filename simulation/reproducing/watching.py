"""Who is told how the files get on."""

from contextlib import AbstractContextManager
from typing import Protocol as Interface

from server.observer import Observer
from simulation.batch.progress import Advance
from simulation.figures.folder import OnPart
from simulation.reproducing.protocols import Protocol


class Watcher(Interface):
    """Is told of every file, and opens what each piece of work reports to."""

    def begins(self, number: int, total: int, protocol: Protocol) -> None:
        """Take that the file with this number, from 1, is played now."""

    def fails(self, protocol: Protocol, reason: str) -> None:
        """Take that a file cannot be played to its end."""

    def counting(self, total: int, noun: str) -> AbstractContextManager[Advance]:
        """Return what counts runs or steps."""

    def observing(self) -> AbstractContextManager[Observer]:
        """Return what follows the rounds of a single run."""

    def drawing(self, parts: str) -> AbstractContextManager[OnPart]:
        """Return what counts the parts of a figure."""
