"""The observer of a run: receives its progress, and does nothing by default."""

import contextlib
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from knnper.audit_log import Recorder
from knnper.errors import harmless

RoundRecord = Mapping[str, Any]
"""Figures of one round by name; ``failures``, if any, has the reasons by client."""
SECONDS_BETWEEN_LINES = 5.0


class Observer:
    """Receives the progress of a run, in the process that leads it; does nothing."""

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Handle that rounds ``first_round`` (from 1) to ``num_rounds`` begin."""

    def round_finished(self, record: RoundRecord) -> None:
        """Handle the record of a round."""

    def personalization_started(self, num_clients: int) -> None:
        """Handle that the personalisation of ``num_clients`` clients begins."""

    def client_personalized(self) -> None:
        """Handle that one more client was personalised and evaluated."""

    def finished(self) -> None:
        """End the observation, also after an error."""


class LoggingObserver(Observer):
    """Logs a line for each round.

    ``record`` records each round with the updates that were rejected, for an audit log.
    """

    def __init__(self, log: logging.Logger, record: Recorder) -> None:
        self._log = log
        self._record = record
        self._num_rounds = 0

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Log the rounds that begin."""
        self._num_rounds = num_rounds
        if first_round <= num_rounds:
            self._log.info("training: rounds %d to %d", first_round, num_rounds)

    def round_finished(self, record: RoundRecord) -> None:
        """Log and record the figures of a round."""
        server_round, figures = record["server_round"], round_figures(record)
        self._log.info("round %d/%d: %s", server_round, self._num_rounds, figures)
        details = ("num_clients", "num_failed", "participants", "failures")
        self._record(
            "round_finished",
            round=server_round,
            **{name: record[name] for name in details if name in record},
        )

    def personalization_started(self, num_clients: int) -> None:
        """Log the number of clients to personalise."""
        if num_clients:
            self._log.info("personalising %d clients", num_clients)

    def finished(self) -> None:
        """Log the end."""
        self._log.info("finished")


@contextlib.contextmanager
def bars(*columns: ProgressColumn) -> Iterator[Progress | None]:
    """Yield a progress display on a terminal or in a notebook; None elsewhere."""
    console = Console(stderr=True)
    # In a notebook rich draws with ipywidgets, or not at all.
    draws = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    if not (console.is_terminal or draws):
        yield None
        return
    common = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*common, *columns, console=console) as progress:
        yield progress


@contextlib.contextmanager
def progress_observer() -> Iterator[Observer]:
    """Yield an observer that draws bars, or writes lines to standard error."""
    with bars(TimeRemainingColumn(), TextColumn("{task.fields[figures]}")) as progress:
        yield TerminalObserver(progress)


def _say(line: str) -> None:
    sys.stderr.write(f"{harmless(line)}\n")


def round_figures(record: Mapping[str, float | int]) -> str:
    """Return the figures of one round as a phrase."""
    # Sites may withhold it, and training with example privacy does.
    loss = record["train_loss"]
    phrases = ["no train loss" if math.isnan(loss) else f"train loss {loss:.3f}"]
    if "validation_accuracy" in record:
        phrases.append(f"validation {100 * record['validation_accuracy']:.1f} %")
    if "validation_accuracy_personal" in record:
        personal = 100 * record["validation_accuracy_personal"]
        phrases.append(f"personalised {personal:.1f} %")
    phrases.append(f"{record['num_clients']} clients")
    if record["num_failed"]:
        phrases.append(f"{record['num_failed']} failed")
    if "epsilon" in record:
        at_delta = f"at delta {record['delta']:.2g}"
        phrases.append(f"epsilon {record['epsilon']:.3g} {at_delta}")
    phrases.append(f"{record['seconds']:.1f} s")
    if "virtual_seconds" in record:
        phrases.append(f"{record['virtual_seconds'] / 3600:.2f} virtual hours")
    return ", ".join(phrases)


class TerminalObserver(Observer):
    """Shows progress bars; without a terminal, writes a line at intervals."""

    def __init__(
        self,
        progress: Progress | None,
        write: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._write, self._clock = progress, write, clock
        self._task, self._total, self._done = TaskID(0), 0, 0
        self._last_line = clock() - SECONDS_BETWEEN_LINES

    def training_started(self, num_rounds: int, first_round: int) -> None:
        """Begin with the rounds that are still to be made."""
        rounds = f"training: rounds {first_round} to {num_rounds}"
        line = rounds if first_round <= num_rounds else ""
        self._start("training", num_rounds, first_round - 1, line)

    def round_finished(self, record: Mapping[str, float | int]) -> None:
        """Show one more round."""
        self._step(f"round {record['server_round']}", "", round_figures(record))

    def personalization_started(self, num_clients: int) -> None:
        """Begin with the clients."""
        self._start(
            "personalising", num_clients, 0, f"personalising {num_clients} clients"
        )

    def client_personalized(self) -> None:
        """Show one more client."""
        self._step(f"personalised {self._done + 1}", " clients")

    def finished(self) -> None:
        """Remove the display."""
        if self._progress is not None:
            self._progress.stop()

    def _start(self, title: str, total: int, done: int, line: str) -> None:
        self._total, self._done = total, done
        if self._progress is not None:
            self._task = self._progress.add_task(
                title, total=total, completed=done, figures=""
            )
        elif line:
            self._write(line)

    def _step(self, line: str, noun: str, figures: str = "") -> None:
        self._done += 1
        if self._progress is not None:
            self._progress.update(self._task, advance=1, figures=figures)
            return
        is_time = self._clock() - self._last_line >= SECONDS_BETWEEN_LINES
        if is_time:
            self._last_line = self._clock()
        if is_time or self._done == self._total:
            details = f": {figures}" if figures else ""
            self._write(f"{line}/{self._total}{noun}{details}")
