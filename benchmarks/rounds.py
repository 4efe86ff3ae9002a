"""Rounds as a run makes them, one at a time."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from benchmarks.measurement import seconds_of
from benchmarks.workload import Workload, on_flower
from knnper.server.federation import Federation
from knnper.server.observer import RoundRecord
from knnper.server.rounds import RoundLoop
from knnper.server.run import untrained
from knnper.server.run_folder import CheckpointFolder
from knnper.simulation.workbench import Workbench
from knnper.strategies.core.method import changed


class Rounds:
    """Training from scratch, with the default checkpoint after each round.

    Parameters
    ----------
    bench, federation
        Who trains what.
    folder
        Where checkpoints go.

    Attributes
    ----------
    num_trained
        Clients whose updates the latest round used.
    """

    def __init__(self, bench: Workbench, federation: Federation, folder: Path) -> None:
        self.num_trained = 0
        self._latest = untrained(bench, bench.roster)
        checkpoints = CheckpointFolder(folder, "benchmark")
        self._loop = RoundLoop(
            bench, federation, bench.roster, checkpoints, self._require_all
        )

    @property
    def weights(self) -> Tensor:
        """The global model's weights, as `FlatModel` has them."""
        weights: Tensor = self._latest.state.weights
        return weights

    def make_one(self) -> None:
        """Make the next round."""
        upto = self._latest.server_round + 1
        self._loop.method = changed(self._loop.method, num_rounds=upto)
        self._latest = self._loop.train(self._latest)

    def seconds_of_one(self) -> float:
        """Make the next round and return how long it takes."""
        return seconds_of(self.make_one)

    def _require_all(self, record: RoundRecord) -> None:
        if failed := record["num_failed"]:
            raise RuntimeError(f"{failed} clients failed: nothing to compare")
        self.num_trained = record["num_clients"]


@contextlib.contextmanager
def rounds_of(bench: Workbench, federation: Federation) -> Iterator[Rounds]:
    """Give rounds whose checkpoints are deleted at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Rounds(bench, federation, Path(folder))


def round_seconds(workload: Workload, num_rounds: int) -> list[float]:
    """Return the seconds of each round after the first, which starts the workers."""

    def lead(bench: Workbench, federation: Federation) -> list[float]:
        with rounds_of(bench, federation) as rounds:
            rounds.make_one()
            return [rounds.seconds_of_one() for _ in range(num_rounds)]

    return on_flower(workload, lead)
