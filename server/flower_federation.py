"""Send requests to clients as Flower's messages, by any carrier of the arrays."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from knnper.errors import CodecError, RunError, printable
from knnper.records import Flat, is_same, unflatten
from knnper.secure.messages import SecureReply
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.task_size import TaskSize
from knnper.strategies.core.evaluation import ClientResults, Validation
from knnper.transport import polling
from knnper.transport.flower_protocol import UNKNOWN_ERROR
from knnper.transport.messages import (
    FAILURES,
    IN_MESSAGE,
    TOGETHER,
    Carrier,
    Job,
    Packed,
    Purpose,
    pack,
    packed_of,
    reply_name,
    to_content,
    unpack,
    unpack_together,
    why_none_can_run,
)

# Flower drops a message this long after its reply is due, so that our timeout is first.
EXPIRES_LATER_S = 10.0


class Packer:
    """Packs the records of requests; a record for many clients is packed once."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._latest: dict[str, tuple[object, Packed]] = {}
        self._in_use: dict[int, Packed] = {}
        self._num_users: Counter[int] = Counter()

    def pack_request(self, request: Request) -> dict[str, Packed]:
        """Pack a request's records, by name."""
        records = {"payload": request.payload}
        if request.reference is not None:
            records["reference"] = request.reference
        if request.masking is not None:
            records["masking"] = request.masking
        return {name: self._pack(name, record) for name, record in records.items()}

    def answered(self, records: dict[str, Packed]) -> None:
        """Release the packed ``records`` of a request that was answered."""
        for packed in records.values():
            self._release(packed)

    def discard_all(self) -> None:
        """Release everything: all requests are answered, and none follows."""
        for packed in self._in_use.values():
            self._carrier.discard(packed)
        self._in_use.clear()

    def _pack(self, name: str, record: object) -> Packed:
        known = self._latest.values()
        same = next(
            (
                packed
                for packed_record, packed in known
                if is_same(packed_record, record)
            ),
            None,
        )
        packed = same or pack(record, self._carrier)
        self._use(packed)
        # The latest record counts as used, since the next request may be for the same.
        self._use(packed)
        _, before = self._latest.get(name, (None, None))
        self._latest[name] = (record, packed)
        if before is not None:
            self._release(before)
        return packed

    def _use(self, packed: Packed) -> None:
        self._in_use[id(packed)] = packed
        self._num_users[id(packed)] += 1

    def _release(self, packed: Packed) -> None:
        self._num_users[id(packed)] -= 1
        if self._num_users[id(packed)] == 0:
            self._carrier.discard(self._in_use.pop(id(packed)))


@dataclass
class FlowerFederation(Federation):
    """A `Federation` behind a Flower grid."""

    grid: Grid
    choose_node: Callable[[str], int]
    update_type: type
    experiment: str
    run_folder: str
    carrier: Carrier = IN_MESSAGE
    session: str = ""
    at_once: int = polling.MESSAGES_AT_ONCE
    stop: threading.Event = field(default_factory=threading.Event)
    paces: Mapping[Purpose, polling.Pace] = field(default_factory=dict)
    patience: polling.Patience = polling.ENDLESS
    model: str = ""
    may_be_away: bool = False
    task_size: TaskSize | None = None  # None where each client has a node of its own
    _window: polling.Window | None = None
    _begun: dict[str, tuple[Purpose, Request, dict[str, Packed]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._packer = Packer(self.carrier)

    @override
    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        size = self.task_size if step.purpose is Purpose.TRAIN else None
        if size is None:
            yield from self._exchange(step, requests, self.at_once)
            return
        began_s, num_clients, first_s = time.monotonic(), 0, math.inf
        at_once = max(2 * size.num_workers, self.at_once // size.num_clients)
        for reply in self._exchange(step, size.joined(requests), at_once):
            # From the first reply, which a worker delays while it loads libraries.
            first_s = min(first_s, time.monotonic())
            size.note_first(num_clients, time.monotonic() - first_s)
            num_clients += 1
            yield reply
        size.note(num_clients, time.monotonic() - began_s)

    def _exchange(
        self, step: Step, requests: Iterable[Request], at_once: int
    ) -> Iterator[Reply]:
        packer = Packer(self.carrier)
        under_way: deque[tuple[Request, dict[str, Packed]]] = deque()

        def messages() -> Iterator[Message]:
            for request in requests:
                records = packer.pack_request(request)
                under_way.append((request, records))
                yield self._message(step, request, records)

        pace = self.paces.get(step.purpose)
        if pace is not None:
            pace.begin()
        patience = replace(self.patience, pace=pace)
        replies = polling.replies_in_order(
            self.grid, messages(), self.stop, at_once, patience
        )
        for message in replies:
            request, records = under_way.popleft()
            packer.answered(records)
            yield from self._replies(step.purpose, request, records, message)
        # Not when the exchange ends early: clients may still be reading. The carrier's
        # folder is deleted at the end of the run.
        packer.discard_all()

    def begin(self, step: Step, request: Request) -> None:
        """Send a request without waiting for the reply, see `answered`."""
        records = self._packer.pack_request(request)
        patience = replace(self.patience, pace=self.paces.get(step.purpose))
        if self._window is None:
            self._window = polling.Window(self.grid, self.at_once, patience)
        name = self._window.push(self._message(step, request, records))
        self._begun[name] = step.purpose, request, records

    def answered(self) -> Sequence[Reply]:
        """Return the replies to `begin` that arrived since the last call."""
        replies: list[Reply] = []
        for name, message in self._window.take() if self._window else ():
            purpose, request, records = self._begun.pop(name)
            self._packer.answered(records)
            replies.extend(self._replies(purpose, request, records, message))
        return replies

    def _message(
        self, step: Step, request: Request, records: dict[str, Packed]
    ) -> Message:
        job = self._job(step, request)
        return Message(
            content=to_content(job, records),
            dst_node_id=self.choose_node(request.clients[0]),
            message_type=step.purpose.value,
            group_id=str(step.server_round),
            # A message that was not fetched by then would only keep a client busy.
            ttl=job.timeout_s + EXPIRES_LATER_S if job.timeout_s else None,
        )

    def _replies(
        self,
        purpose: Purpose,
        request: Request,
        records: dict[str, Packed],
        message: Message | polling.NoReply,
    ) -> Iterator[Reply]:
        """Yield a reply for each client of a training; otherwise one for all."""
        sent_bytes = sum(packed.num_bytes for packed in records.values())
        most_bytes = max(
            polling.LEAST_LIMIT_BYTES, polling.MOST_TIMES_SENT * sent_bytes
        )
        of_each = [(client,) for client in request.clients]
        groups = of_each if purpose is Purpose.TRAIN else [request.clients]
        try:
            content = self._content(message)
            together = self._together(content, len(groups), most_bytes)
        except CodecError as error:
            reason = printable(str(error))
            yield from (Reply(clients, None, reason) for clients in groups)
            return
        for number, clients in enumerate(groups):
            try:
                flat = together.pop(number, None)
                record = self._record(purpose, content, number, flat, most_bytes)
            except CodecError as error:
                yield Reply(clients, None, printable(str(error)))
            else:
                yield Reply(clients, record)

    def _job(self, step: Step, request: Request) -> Job:
        pace, first = self.paces.get(step.purpose), request.clients[0]
        return Job(
            clients=list(request.clients),
            server_round=request.server_round or step.server_round,
            counted_round=step.server_round,
            keep_rounds=list(step.keep_rounds),
            experiment=self.experiment,
            run_folder=self.run_folder,
            shared_folder=self.carrier.name,
            session=self.session,
            timeout_s=0.0 if pace is None else pace.timeout_s(self.choose_node(first)),
            model=self.model,
            seen=request.seen,
            state_rounds=list(request.state_rounds),
        )

    def _content(self, message: Message | polling.NoReply) -> RecordDict:
        if isinstance(message, polling.NoReply):
            raise CodecError(message.reason)
        if message.has_error():
            if not self.may_be_away:
                _stop_if_no_client_is_to_blame(message)
            raise CodecError(message.error.reason or "no reason was given")
        return message.content

    def _together(
        self, content: RecordDict, num_clients: int, most_bytes: int
    ) -> dict[int, Flat]:
        """Unpack replies of several clients in one record; {} for a single client."""
        packed = packed_of(content, TOGETHER) if num_clients > 1 else None
        if packed is None:
            return {}
        try:
            return unpack_together(packed, self.carrier, num_clients * most_bytes)
        finally:
            self.carrier.discard(packed)

    def _record(
        self,
        purpose: Purpose,
        content: RecordDict,
        number: int,
        flat: Flat | None,  # the record, if it arrived with others
        most_bytes: int,
    ) -> object:
        answers: dict[Purpose, type] = {
            Purpose.TRAIN: self.update_type,
            Purpose.VALIDATE: Validation,
            Purpose.PERSONALIZE: ClientResults,
            Purpose.SECURE: SecureReply,
        }
        if flat is not None:
            return unflatten(answers[purpose], flat)
        # `content.config_records` would visit the records of all clients.
        failures = content.get(FAILURES)
        if isinstance(failures, ConfigRecord) and str(number) in failures:
            raise CodecError(str(failures[str(number)]))
        packed = packed_of(content, reply_name(number))
        if packed is None:
            raise CodecError("the reply is empty")
        try:
            return unpack(answers[purpose], packed, self.carrier, most_bytes)
        finally:
            self.carrier.discard(packed)


def _stop_if_no_client_is_to_blame(message: Message) -> None:
    """End the run if a worker fails for every client, whichever it is given."""
    # Otherwise the few clients of other workers would make up the round: Flower puts a
    # dead Ray actor back into its pool, where it fails every message at once.
    reason = message.error.reason or ""
    set_up = why_none_can_run(reason)
    if set_up is not None:
        raise RunError(set_up)
    if message.error.code == UNKNOWN_ERROR or "ActorDied" in reason:
        raise RunError(f"a worker process died, perhaps for lack of memory: {reason}")
