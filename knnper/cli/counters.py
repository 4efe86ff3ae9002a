"""Progress of long commands: a bar on a terminal, lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.progress import Progress, TextColumn, TimeRemainingColumn

from knnper.cli.terminal import say
from knnper.server.observer import SECONDS_BETWEEN_LINES, bars

if TYPE_CHECKING:
    from knnper.simulation.batches.progress import Advance
    from knnper.simulation.batches.progress import Progress as BatchProgress

_SECONDS_WITHOUT_NEWS = 60.0
_MINUTES_WITHOUT_SECONDS = 10


@contextlib.contextmanager
def run_counter(total: int, noun: str = "runs") -> Iterator["Advance"]:
    """Yield a function that shows the progress of a batch with ``total`` steps."""
    with bars(TextColumn("{task.fields[left]}")) as progress:
        if progress is None:
            yield line_counter(total, say, noun=noun)
            return
        task = progress.add_task(noun, total=total, left="")

        def advance(now: "BatchProgress") -> None:
            progress.update(
                task, completed=now.done, total=now.total, left=time_left(now)
            )

        yield advance


def time_left(now: "BatchProgress") -> str:
    """Return the remaining time in words; empty if unknown, and at the end."""
    if now.seconds_left is None or now.done >= now.total:
        return ""
    return f"some {roughly(now.seconds_left)} left"


def roughly(seconds: float) -> str:
    """Round a time to a minute, or below ten minutes to 10 s."""
    minutes, seconds_more = divmod(10 * max(round(seconds / 10), 1), 60)
    if minutes >= _MINUTES_WITHOUT_SECONDS:
        return f"{round(seconds / 60)} min"
    if not minutes:
        return f"{seconds_more} s"
    return f"{minutes} min {seconds_more:02d} s"


def line_counter(
    total: int,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    noun: str = "runs",
) -> "Advance":
    """Return a function that writes the progress as lines, every few seconds."""
    last_line, last_done = clock(), 0
    write(f"{total} {noun}")

    def advance(now: "BatchProgress") -> None:
        nonlocal last_line, last_done
        line = f"{now.done}/{now.total} {noun}"
        waited = clock() - last_line
        if now.done == now.at_start > last_done:
            write(f"{line} were done before")
        elif (
            now.done == now.total > last_done
            or (now.done > last_done and waited >= SECONDS_BETWEEN_LINES)
            or waited >= _SECONDS_WITHOUT_NEWS
        ):
            write(f"{line} {time_left(now)}".rstrip())
        else:
            return
        last_line, last_done = clock(), now.done

    return advance


class Counter:
    """Counts items with a bar, or without a terminal with lines."""

    def __init__(
        self,
        noun: str,
        progress: Progress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noun, self._progress, self._clock = noun, progress, clock
        if progress is not None:
            self._bar = progress.add_task(noun, total=None)
        self._began = self._last_line = clock()
        self.num_done = self._total = 0

    def start(self, total: int) -> None:
        """Set the number of items."""
        self._total = total
        self._began = self._last_line = self._clock()
        if self._progress is not None:
            self._progress.update(self._bar, total=total)

    def advance(self, count: int) -> None:
        """Count further items as done."""
        self.num_done += count
        if self._progress is not None:
            self._progress.advance(self._bar, count)
        elif self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            per_item = (self._clock() - self._began) / self.num_done
            remaining = per_item * (self._total - self.num_done)
            say(f"{self._noun}: {self.num_done}/{self._total}, {remaining:.0f} s left")


@contextlib.contextmanager
def counter(noun: str, *, is_kept: bool = False) -> Iterator[Counter]:
    """Yield a counter. If ``is_kept``, a message after Ctrl-C offers to continue."""
    with bars(TimeRemainingColumn()) as progress:
        counting = Counter(noun, progress)
        try:
            yield counting
        except KeyboardInterrupt:
            if is_kept and counting.num_done:
                say("The counted items are kept; repeat the command to continue.")
            raise
