"""The progress of a run in another process, from its folder."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from knnper.cli.formats import MOST_NAMED, listed
from knnper.cli.terminal import say
from knnper.server.observer import Observer, progress_observer
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.simulation.catalogue import experiment_catalogue

LOOK_EVERY_S = 0.5


class Watch:
    """Shows new rounds and results of a run's folder to an observer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = _version(path / RESULTS)
        self._run = _version(path / EXPERIMENT)
        self._num_shown = len(RunFolder(path).rounds()) if self._run else 0
        self._has_started = False
        self._left_out: list[str] = []

    def follow(self, has_ended: Callable[[], bool]) -> bool:
        """Show the run until it ends; return whether it has new results."""
        with progress_observer() as observer:
            return self.until_done(observer, has_ended)

    def until_done(self, observer: Observer, has_ended: Callable[[], bool]) -> bool:
        """Show the run to an observer until it ends; return whether it has results."""
        while True:
            ended = has_ended()
            results = _version(self._path / RESULTS)
            # After the look at the results, so that their last round is shown.
            self._show_news(observer)
            if results is not None and results != self._before:
                return True
            if ended:
                return False
            time.sleep(LOOK_EVERY_S)

    def _show_news(self, observer: Observer) -> None:
        run = _version(self._path / EXPERIMENT)
        if run is None:
            return
        if run != self._run:  # another run has replaced it
            self._run, self._num_shown, self._has_started = run, 0, False
        folder = RunFolder(self._path)
        if not self._has_started:
            self._has_started = True
            num_rounds = folder.experiment(experiment_catalogue()).training.num_rounds
            observer.training_started(num_rounds, self._num_shown + 1)
        rounds = folder.rounds()
        if len(rounds) < self._num_shown:
            say(f"the run went back to round {len(rounds)}, see its log")
            self._num_shown = len(rounds)
        for record in rounds[self._num_shown :]:
            known = {
                name: math.nan if value is None else value
                for name, value in record.items()
            }
            observer.round_finished(known)
            for line in failures_in(record):
                say(line)
            if (left_out := record.get("left_out", [])) != self._left_out:
                self._left_out = left_out
                named = listed(left_out) or "none"
                say(f"round {record['server_round']}: clients left out: {named}")
        self._num_shown = len(rounds)


def failures_in(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line with the reason for the first clients that failed in a round."""
    named = list(record.get("failures", {}).items())[:MOST_NAMED]
    for client, reason in named:
        yield f"round {record['server_round']}: client {client} failed: {reason}"
    if named and record["num_failed"] > len(named):
        yield f"and {record['num_failed'] - len(named)} more, see rounds.jsonl"


def _version(file: Path) -> tuple[int, int] | None:
    """Return a value that changes with a file's content; None without a file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
