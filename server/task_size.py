"""How many clients one message trains."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from knnper.records import is_same
from knnper.server.federation import Request

TASK_S, SHORTEST_TASK_S = 0.25, 0.03

_TASKS_PER_WORKER = 4


@dataclass
class TaskSize:
    """Number of clients that one message trains, for workers that train any client.

    A message costs some milliseconds, so clients that train for `TASK_S` together share
    one. The duration is estimated from the last round, and in the first round from the
    replies so far. The last tasks of a round become shorter, so that all workers end at
    about the same time. Each client is trained, and replies, as if it were alone.

    Attributes
    ----------
    num_clients
        Clients of all but the last tasks.
    fewest
        Clients of the last tasks.
    num_expected
        Clients of the next round; None before the first.
    """

    num_workers: int
    num_clients: int = 1
    fewest: int = 1
    num_expected: int | None = None

    def note_first(self, num_clients: int, seconds: float) -> None:
        """Note how many clients replied since the first reply of the first round."""
        if self.num_expected is None and num_clients and seconds > 0:
            fitting = int(TASK_S * num_clients / (seconds * self.num_workers))
            self.num_clients = max(1, min(fitting, num_clients))

    def note(self, num_clients: int, seconds: float) -> None:
        """Note the clients and the duration of a round."""
        each_s = max(seconds * self.num_workers / max(num_clients, 1), 1e-6)
        most = max(1, num_clients // (_TASKS_PER_WORKER * self.num_workers))
        self.num_clients = max(1, min(int(TASK_S / each_s), most))
        self.fewest = max(1, min(int(SHORTEST_TASK_S / each_s), most))
        self.num_expected = num_clients

    def joined(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Join successive requests with the same payload into tasks."""
        waiting: list[Request] = []
        num_before = 0
        for request in requests:
            if waiting and (
                len(waiting) >= self._size_after(num_before)
                or waiting[0].server_round != request.server_round
                or request.masking is not None
                or not is_same(waiting[0].payload, request.payload)
            ):
                yield _joined(waiting)
                num_before += len(waiting)
                waiting = []
            waiting.append(request)
        if waiting:
            yield _joined(waiting)

    def _size_after(self, num_before: int) -> int:
        if self.num_expected is None:
            return self.num_clients
        # Half of a worker's share of the remaining clients.
        share = (self.num_expected - num_before) // (2 * self.num_workers)
        return min(self.num_clients, max(self.fewest, share))


def _joined(requests: Sequence[Request]) -> Request:
    return replace(
        requests[0],
        clients=tuple(request.client for request in requests),
        state_rounds=tuple(
            itertools.chain.from_iterable(request.state_rounds for request in requests)
        ),
    )
