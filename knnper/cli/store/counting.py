"""How far a command is, on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from knnper.cli.output import say

SECONDS_BETWEEN_LINES = 5.0


class Counter:
    """Draws a bar, or writes a line now and then with the time that is left.

    Parameters
    ----------
    what
        What is counted.
    progress
        Where to draw; None writes lines.
    clock
        Returns seconds.
    """

    def __init__(
        self,
        what: str,
        progress: Progress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._progress, self._clock = what, progress, clock
        self._bar = None if progress is None else progress.add_task(what, total=None)
        self._began = self._last_line = clock()
        self._done = self._total = 0

    def start(self, total: int) -> None:
        """Say how many there are."""
        self._total = total
        self._began = self._last_line = self._clock()
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, total=total)

    @property
    def num_done(self) -> int:
        """How many are done."""
        return self._done

    def advance(self, count: int) -> None:
        """Say that so many more are done."""
        self._done += count
        if self._progress is not None and self._bar is not None:
            self._progress.advance(self._bar, count)
        elif self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            say(self._line())

    def _line(self) -> str:
        per_one = (self._clock() - self._began) / self._done
        left = per_one * (self._total - self._done)
        return f"{self._what}: {self._done}/{self._total}, {left:.0f} s left"


@contextlib.contextmanager
def counter(what: str) -> Iterator[Counter]:
    """Yield a counter that draws on a terminal, and writes lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Counter(what, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Counter(what, progress)


@contextlib.contextmanager
def resumable(progress: Counter) -> Iterator[None]:
    """Say that an interrupted command goes on when it is given again."""
    try:
        yield
    except KeyboardInterrupt:
        if progress.num_done:
            say("What was counted is kept; give the same command again to go on.")
        raise
