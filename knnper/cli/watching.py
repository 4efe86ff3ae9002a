"""A run that another process leads, shown as it gets on."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from server.observer import Observer
from server.run_folder import EXPERIMENT, RESULTS, RunFolder
from simulation.catalogue import experiment_catalogue

LOOK_EVERY_S = 0.5


class Watch:
    """Tells an observer what a run's folder says from now on.

    Parameters
    ----------
    path
        The run's folder; it may be made later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = _written(path)
        self._started = False
        self._told_rounds = 0

    def until_done(self, observer: Observer, has_ended: Callable[[], bool]) -> bool:
        """Follow the run until it has new results; return whether it has.

        Parameters
        ----------
        observer
            Is told of every step.
        has_ended
            Whether the run has ended, in whatever way. Asked at each look.
        """
        while True:
            ended = has_ended()
            if (self._path / EXPERIMENT).is_file():
                self._tell(RunFolder.open(self._path), observer)
            if _written(self._path) != self._before:
                return True
            if ended:
                return False
            time.sleep(LOOK_EVERY_S)

    def _tell(self, folder: RunFolder, observer: Observer) -> None:
        rounds = folder.rounds()
        if not self._started:
            self._started, self._told_rounds = True, len(rounds)
            num_rounds = folder.experiment(experiment_catalogue()).training.num_rounds
            observer.training_started(num_rounds, len(rounds) + 1)
        for record in rounds[self._told_rounds :]:
            observer.round_finished(_with_numbers(record))
        self._told_rounds = max(self._told_rounds, len(rounds))


def _with_numbers(record: Mapping[str, float | None]) -> dict[str, float]:
    """Return a round's figures with NaN for those that are not known."""
    return {
        name: math.nan if value is None else value for name, value in record.items()
    }


def _written(path: Path) -> tuple[int, int] | None:
    """Return what tells one results file from another; None if there is none."""
    try:
        status = (path / RESULTS).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
