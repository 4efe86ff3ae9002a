"""Rounds of a run, one at a time."""

import contextlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from torch import Tensor

from benchmarks.measurement import seconds_of
from benchmarks.workload import Workload, on_flower
from knnper.server.checkpoints import CheckpointFolder
from knnper.server.federation import Federation
from knnper.server.observer import RoundRecord
from knnper.server.rounds import RoundLoop, untrained
from knnper.simulation.workbench import Workbench
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.method import changed

MOST_ROUNDS = 100_000


class _Enough(Exception):
    """Raised when no more rounds are requested."""


class Rounds(contextlib.AbstractContextManager["Rounds"]):
    """A new run with default checkpoints that waits for a request before each round.

    A round is measured under the conditions of a run: clients train while the
    checkpoint of the previous round is written to ``folder``.
    """

    def __init__(self, bench: Workbench, federation: Federation, folder: Path) -> None:
        self.num_trained = 0  # clients with an update in the latest round
        self._start = untrained(bench, bench.roster)
        self._state, self._aggregate = self._start.state, bench.method.aggregate
        method = changed(
            bench.method, num_rounds=MOST_ROUNDS, aggregate=self._aggregated
        )
        self._loop = RoundLoop(
            replace(bench, method=method),
            federation,
            bench.roster,
            CheckpointFolder(folder, "benchmark"),
            self._made,
        )
        self._requests, self._done = Queue[bool](), Queue[None]()
        self._thread = ThreadPoolExecutor(1)
        self._has_ended = False
        self._run = self._thread.submit(self._train)

    def __exit__(self, *_: object) -> None:
        self._requests.put(False)
        self._thread.shutdown()

    @property
    def weights(self) -> Tensor:
        """The global model's weights as one flat vector; see `FlatModel`."""
        weights: Tensor = self._state.weights
        return weights

    def make_round(self) -> None:
        """Make the next round."""
        self._requests.put(True)
        self._done.get()
        if self._has_ended:
            self._run.result()

    def measure_round(self) -> float:
        """Make the next round and return its duration in seconds."""
        return seconds_of(self.make_round)

    def _train(self) -> None:
        try:
            self._wait()
            self._loop.train(self._start)
        except _Enough:
            pass
        finally:
            self._has_ended = True
            self._done.put(None)

    def _wait(self) -> None:
        if not self._requests.get():
            raise _Enough

    def _aggregated(self, state: Any, updates: Updates[Any]) -> Any:
        self._state = self._aggregate(state, updates)
        return self._state

    def _made(self, record: RoundRecord) -> None:
        if failed := record["num_failed"]:
            raise RuntimeError(f"{failed} clients failed: nothing to compare")
        self.num_trained = record["num_clients"]
        self._done.put(None)
        self._wait()


@contextlib.contextmanager
def rounds_of(bench: Workbench, federation: Federation) -> Iterator[Rounds]:
    """Yield rounds; delete their checkpoints at the end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Rounds(bench, federation, Path(folder)) as rounds,
    ):
        yield rounds


def round_seconds(workload: Workload, num_rounds: int) -> list[float]:
    """Measure the seconds of each round after the first, which starts the workers."""

    def lead(bench: Workbench, federation: Federation) -> list[float]:
        with rounds_of(bench, federation) as rounds:
            rounds.make_round()
            return [rounds.measure_round() for _ in range(num_rounds)]

    return on_flower(workload, lead)
