"""Training over the serial engine, with replies that are lost on their way."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from knnper.experiment_file import results_identity
from knnper.secure.messages import SecureRequest
from knnper.server.checkpoints import Checkpoint, CheckpointFolder
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.observer import RoundRecord
from knnper.server.rounds import RoundLoop, untrained
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import Workbench, runtime_of
from knnper.transport.messages import Purpose

Stage = type | None
"""The type of a request of secure aggregation; None for a training."""
Lost = Mapping[int, Mapping[str, Stage]]
"""By round and client, the stage of the reply that is lost."""


@dataclasses.dataclass
class LosingReplies(Federation):
    """Forwards requests to a federation, and loses some of the replies."""

    inner: Federation
    lost: Lost
    num_trainings: int = 0

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        of_round = self.lost.get(step.server_round, {})
        for request in requests:
            self.num_trainings += step.purpose is Purpose.TRAIN
            (reply,) = self.inner.exchange(step, [request])
            payload = request.payload
            stage = (
                type(payload.message) if isinstance(payload, SecureRequest) else None
            )
            if of_round.get(request.client, "no stage") == stage:
                yield Reply(request.clients, None, "the reply was lost")
            else:
                yield reply


def losing(bench: Workbench, folder: Path, lost: Lost) -> LosingReplies:
    """Return the virtual clients of ``bench``, with lost replies."""
    return LosingReplies(SerialFederation(runtime_of(bench, folder)), lost)


def train(
    bench: Workbench,
    federation: Federation,
    folder: Path,
    records: list[RoundRecord] | None = None,
) -> Checkpoint:
    """Train over a federation; append the records of the rounds to ``records``."""
    checkpoints = CheckpointFolder(
        folder / "checkpoints", results_identity(bench.experiment)
    )
    kept: list[RoundRecord] = [] if records is None else records
    loop = RoundLoop(bench, federation, bench.roster, checkpoints, kept.append)
    return loop.train(untrained(bench, bench.roster))


def trained(
    bench: Workbench,
    folder: Path,
    lost: Lost | None = None,
    records: list[RoundRecord] | None = None,
) -> Checkpoint:
    """Train the virtual clients of ``bench``."""
    return train(bench, losing(bench, folder, lost or {}), folder, records)
