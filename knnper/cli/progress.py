"""How a run gets on, on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from knnper.cli.output import say
from server.observer import Observer

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def progress_observer() -> Iterator[Observer]:
    """Yield an observer that draws bars on a terminal, and writes lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LineObserver(say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield BarObserver(progress)


@contextlib.contextmanager
def run_counter(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many more of ``total`` runs are done.

    It draws a bar with the time that is left on a terminal, and writes lines elsewhere.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_counter(total)
        return
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("runs", total=total)
        yield lambda number: progress.advance(task, number)


def _line_counter(
    total: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    done, last_line, began = 0, clock() - SECONDS_BETWEEN_LINES, clock()

    def advance(number: int) -> None:
        nonlocal done, last_line
        done += number
        now = clock()
        if now - last_line >= SECONDS_BETWEEN_LINES or done == total:
            last_line = now
            left = (now - began) * (total - done) / done if done else 0.0
            say(f"{done}/{total} runs, some {left:.0f} s left")

    return advance


def round_figures(record: Mapping[str, float | int]) -> str:
    """Return the figures of one round as a phrase."""
    phrases = [f"train loss {record['train_loss']:.3f}"]
    if "validation_accuracy" in record:
        phrases.append(f"validation {100 * record['validation_accuracy']:.1f} %")
    phrases.append(f"{record['num_clients']} clients")
    if record["num_failed"]:
        phrases.append(f"{record['num_failed']} failed")
    phrases.append(f"{record['seconds']:.1f} s")
    return ", ".join(phrases)


class BarObserver:
    """Draws one bar for the rounds and one for the personalisation.

    Parameters
    ----------
    progress
        Where to draw; needs the field ``figures``.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = TaskID(0)

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Draw the bar of the rounds, with those that were made before."""
        self._start("training", num_rounds, first_round - 1)

    def round_finished(self, record: Mapping[str, float | int]) -> None:
        """Move on by one round."""
        figures = round_figures(record)
        self._progress.update(self._task, advance=1, figures=figures)

    def personalization_started(self, num_clients: int) -> None:
        """Draw the bar of the clients."""
        self._start("personalising", num_clients, 0)

    def client_personalized(self) -> None:
        """Move on by one client."""
        self._progress.advance(self._task)

    def finished(self) -> None:
        """Draw no more."""
        self._progress.stop()

    def _start(self, description: str, total: int, completed: int) -> None:
        self._task = self._progress.add_task(
            description, total=total, completed=completed, figures=""
        )


class LineObserver:
    """Writes a line now and then.

    Parameters
    ----------
    write
        Takes a line.
    clock
        Returns seconds.
    """

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._last_line = clock() - SECONDS_BETWEEN_LINES
        self._total = 0
        self._done = 0

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Say which rounds are to be made."""
        self._total = num_rounds
        if first_round <= num_rounds:
            self._write(f"training: rounds {first_round} to {num_rounds}")

    def round_finished(self, record: Mapping[str, float | int]) -> None:
        """Say how the round went, unless another line was written just now."""
        number = record["server_round"]
        if self._is_time() or number == self._total:
            self._write(f"round {number}/{self._total}: {round_figures(record)}")

    def personalization_started(self, num_clients: int) -> None:
        """Say how many clients there are."""
        self._total, self._done = num_clients, 0
        self._write(f"personalising {num_clients} clients")

    def client_personalized(self) -> None:
        """Say how many are done, unless another line was written just now."""
        self._done += 1
        if self._is_time():
            self._write(f"personalised {self._done}/{self._total} clients")

    def finished(self) -> None:
        """Say nothing: the results follow."""

    def _is_time(self) -> bool:
        now = self._clock()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True
