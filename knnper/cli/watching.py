"""The progress of a run that another process leads."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from knnper.cli.terminal import MOST_NAMED, listed, say
from knnper.server.observer import Observer, progress_observer
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.simulation.catalogue import experiment_catalogue

LOOK_EVERY_S = 0.5


class Watch:
    """Tells an observer what a run's folder says from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = _version(path / RESULTS)
        self._run = _version(path / EXPERIMENT)
        self._num_told = len(RunFolder(path).rounds()) if self._run else 0
        self._has_started = False
        self._left_out: list[str] = []

    def follow(self, has_ended: Callable[[], bool]) -> bool:
        """Show the run until it has new results, or ended; return whether it has."""
        with progress_observer() as observer:
            return self.until_done(observer, has_ended)

    def until_done(self, observer: Observer, has_ended: Callable[[], bool]) -> bool:
        """Follow the run until it has new results; return whether it has."""
        while True:
            ended = has_ended()
            results = _version(self._path / RESULTS)
            # After the results were looked for: their last round must be told.
            self._tell(observer)
            if results is not None and results != self._before:
                return True
            if ended:
                return False
            time.sleep(LOOK_EVERY_S)

    def _tell(self, observer: Observer) -> None:
        run = _version(self._path / EXPERIMENT)
        if run is None:
            return
        if run != self._run:  # another one has taken its place
            self._run, self._num_told, self._has_started = run, 0, False
        folder = RunFolder(self._path)
        if not self._has_started:
            self._has_started = True
            num_rounds = folder.experiment(experiment_catalogue()).training.num_rounds
            observer.training_started(num_rounds, self._num_told + 1)
        rounds = folder.rounds()
        if len(rounds) < self._num_told:
            say(f"the run went back to round {len(rounds)}, see its log")
            self._num_told = len(rounds)
        for record in rounds[self._num_told :]:
            known = {
                name: math.nan if one is None else one for name, one in record.items()
            }
            observer.round_finished(known)
            for line in failures_in(record):
                say(line)
            if (left_out := record.get("left_out", [])) != self._left_out:
                self._left_out = left_out
                named = listed(left_out) or "none"
                say(f"round {record['server_round']}: clients left out: {named}")
        self._num_told = len(rounds)


def failures_in(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each client that failed in a round, and why; a few at most."""
    named = list(record.get("failures", {}).items())[:MOST_NAMED]
    for client, reason in named:
        yield f"round {record['server_round']}: client {client} failed: {reason}"
    if named and record["num_failed"] > len(named):
        yield f"and {record['num_failed'] - len(named)} more, see rounds.jsonl"


def _version(file: Path) -> tuple[int, int] | None:
    """Return what tells one content of a file from another; None without a file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
