"""Clients reached through a Flower grid: simulated on Ray, or real ones."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from knnper.config.errors import RunError
from knnper.transport.codec import CodecError, take_apart
from knnper.transport.messages import (
    Job,
    Packed,
    Purpose,
    discard,
    pack,
    packed_of,
    to_content,
    unpack,
)
from knnper.transport.polling import replies_in_order
from server.federation import Reply, Request
from strategies.core.evaluation import ClientResult, Evaluation


@dataclass
class FlowerFederation:
    """A `Federation` behind a Flower grid.

    Attributes
    ----------
    grid
        Flower's grid.
    node_of
        The node that plays each client, by the client's name.
    update_type
        What a client answers to `Purpose.TRAIN`.
    experiment
        The experiment as JSON, sent with every request.
    run_folder, shared_folder
        See `Job`.
    stop
        Ends waiting for replies when it is set.
    """

    grid: Grid
    node_of: Mapping[str, int]
    update_type: type
    experiment: str
    run_folder: str
    shared_folder: str
    stop: threading.Event = field(default_factory=threading.Event)

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_round: int,
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """See `Federation.exchange`."""
        names: list[str] = []
        packer = _Packer(self.shared_folder)

        def messages() -> Iterator[Message]:
            for request in requests:
                names.append(request.client)
                job = self._job(request.client, server_round, keep_round)
                yield self._message(purpose, job, packer.pack_request(request))

        try:
            replies = replies_in_order(self.grid, messages(), self.stop)
            for position, message in enumerate(replies):
                yield self._reply(names[position], purpose, message)
        finally:
            packer.discard_all()

    def _job(self, client: str, server_round: int, keep_round: int) -> Job:
        return Job(
            client=client,
            server_round=server_round,
            keep_round=keep_round,
            experiment=self.experiment,
            run_folder=self.run_folder,
            shared_folder=self.shared_folder,
        )

    def _message(
        self, purpose: Purpose, job: Job, records: dict[str, Packed]
    ) -> Message:
        return Message(
            content=to_content(job, records),
            dst_node_id=self.node_of[job.client],
            message_type=purpose.value,
            group_id=str(job.server_round),
        )

    def _reply(self, client: str, purpose: Purpose, message: Message) -> Reply:
        if message.has_error():
            _stop_if_worker_died(message)
            return Reply(client, None, message.error.reason or "no reason was given")
        packed = packed_of(message.content, "reply")
        if packed is None:
            return Reply(client, None, "the reply is empty")
        try:
            return Reply(client, unpack(self._record_type(purpose), packed))
        except CodecError as error:
            return Reply(client, None, str(error))
        finally:
            discard(packed)

    def _record_type(self, purpose: Purpose) -> type:
        answers: dict[Purpose, type] = {
            Purpose.TRAIN: self.update_type,
            Purpose.VALIDATE: Evaluation,
            Purpose.PERSONALIZE: ClientResult,
        }
        return answers[purpose]


class _Packer:
    """Packs records for sending, the same one only once."""

    def __init__(self, shared_folder: str) -> None:
        self._shared_folder = shared_folder
        self._packed: list[Packed] = []
        self._latest: dict[str, tuple[Any, Packed]] = {}

    def pack_request(self, request: Request) -> dict[str, Packed]:
        records = {"payload": request.payload}
        if request.reference is not None:
            records["reference"] = request.reference
        return {name: self._pack(name, record) for name, record in records.items()}

    def discard_all(self) -> None:
        for packed in self._packed:
            discard(packed)

    def _pack(self, name: str, record: object) -> Packed:
        for latest, packed in self._latest.values():
            if _same(latest, record):
                return packed
        packed = pack(record, self._shared_folder)
        self._packed.append(packed)
        self._latest[name] = (record, packed)
        return packed


def _same(one: object, other: object) -> bool:
    """Return whether two records hold the very same tensors and equal values."""
    if one is other:
        return True
    first, second = take_apart(one), take_apart(other)
    return first.structure == second.structure and all(
        _same_memory(tensor, second.tensors[name])
        for name, tensor in first.tensors.items()
    )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _stop_if_worker_died(message: Message) -> None:
    """Refuse to go on with a pool in which one worker process is dead.

    Flower puts a dead Ray actor back into its pool, where it fails every message it
    is given at once; the few clients that still answer would make up the round.
    """
    reason = message.error.reason or ""
    if message.error.code == ErrorCode.UNKNOWN or "ActorDied" in reason:
        raise RunError(f"a worker process died, perhaps for lack of memory: {reason}")
