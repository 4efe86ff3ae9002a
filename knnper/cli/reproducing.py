"""What a terminal shows while protocol files are played."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from knnper.cli.figures.progress import progress
from knnper.cli.output import say
from knnper.cli.progress import progress_observer, run_counter

if TYPE_CHECKING:
    from server.observer import Observer
    from simulation.batch.progress import Advance
    from simulation.figures.folder import OnPart
    from simulation.reproducing.protocols import Protocol


class TerminalWatcher:
    """Writes a line before each file, and draws a bar for each piece of work."""

    def begins(self, number: int, total: int, protocol: "Protocol") -> None:
        """Say which file comes now."""
        say(f"{number} of {total}  {protocol.name} ({protocol.kind})")

    def fails(self, protocol: "Protocol", reason: str) -> None:
        """Say at once why a file is not played to its end."""
        say(f"{protocol.name} is not done: {reason}")

    def counting(self, total: int, noun: str) -> "AbstractContextManager[Advance]":
        """Return the bar of a sweep or a comparison."""
        return run_counter(total, noun)

    def observing(self) -> "AbstractContextManager[Observer]":
        """Return the bars of a run."""
        return progress_observer()

    def drawing(self, parts: str) -> "AbstractContextManager[OnPart]":
        """Return the bar of a figure."""
        return progress(parts)
