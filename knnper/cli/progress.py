"""How a run gets on, on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    # It loads torch, which a run's bars need not wait for.
    from simulation.batch.progress import Advance
    from simulation.batch.progress import Progress as BatchProgress

SECONDS_BETWEEN_LINES = 5.0
_SECONDS_WITHOUT_NEWS = 60.0
_MINUTES_WITHOUT_SECONDS = 10


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
def run_counter(total: int, noun: str = "runs") -> Iterator["Advance"]:
    """Yield a function that is told how far a batch of ``total`` runs is.

    There is a bar on a terminal, and lines elsewhere.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line_counter(total, say, noun=noun)
        return
    columns = (
        TextColumn(noun),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(noun, total=total, left="")

        def advance(now: "BatchProgress") -> None:
            left = time_left(now)
            progress.update(task, completed=now.done, total=now.total, left=left)

        yield advance


def time_left(now: "BatchProgress") -> str:
    """Return the time that is left in words; empty if unknown, and in the end."""
    if now.left is None or now.done >= now.total:
        return ""
    about = "at least" if now.left.is_least else "some"
    return f"{about} {roughly(now.left.seconds)} left"


def roughly(seconds: float) -> str:
    """Return a time as exactly as it can be known: to a minute, or to 10 s."""
    minutes, rest = divmod(10 * max(round(seconds / 10), 1), 60)
    if minutes >= _MINUTES_WITHOUT_SECONDS:
        return f"{round(seconds / 60)} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def line_counter(
    total: int,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    noun: str = "runs",
) -> "Advance":
    """Return a counter that writes a line now and then; see `run_counter`.

    It writes at once how many there are, and how many were found; then when there is
    something new, and once a minute while there is not.
    """
    last_line, last_done = clock(), 0
    write(f"{total} {noun}")

    def advance(now: "BatchProgress") -> None:
        nonlocal last_line, last_done
        line = f"{now.done}/{now.total} {noun}"
        waited = clock() - last_line
        if now.done == now.found > last_done:
            write(f"{line} are there")
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
        if self._is_time() or self._done == self._total:
            self._write(f"personalised {self._done}/{self._total} clients")

    def finished(self) -> None:
        """Say nothing: the results follow."""

    def _is_time(self) -> bool:
        now = self._clock()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True
