"""Hold nodes' requests for messages until Flower may have one (long polling).

A SuperNode requests messages all day, and each request costs Flower a transaction in
its database: three idle clients kept an eighth of a core busy. So the gateway asks
Flower only when it may have a message. Messages are sent by ServerApps, which are
processes of this server, and those of this project write the receiving nodes to a pipe
(`knnper.transport.polling.push`). While another ServerApp runs, such as an operator's
own app, Flower is asked every second.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

# Flower's client gives up after 30 s, and Flower itself may need seconds to answer.
LONGEST_HOLD_S = 20.0
# A node that has just worked is answered soon, since it may be about to leave.
SHORTEST_HOLD_S = 0.05
# Interval of requests during a run without an announcement, in case the gateway was too
# busy to read one.
CHECK_INTERVAL_S = 60.0
# The same while a ServerApp runs that has announced nothing.
UNANNOUNCED_INTERVAL_S = 1.0
_PIPE_BYTES = 65_536
# Without authentication, a client can use any number of node ids.
_MOST_REMEMBERED = 10_000


@dataclass
class _NodeRequests:
    """The held request of a node, and its announced and fetched messages."""

    active_at: float = field(default_factory=time.monotonic)
    num_announced: int = 0
    num_fetched: int = 0
    asked_at: float = -math.inf
    request: asyncio.Event | None = None  # of the held request; set to check again

    @property
    def hold_s(self) -> float:
        idle_s = time.monotonic() - self.active_at
        return min(max(idle_s, SHORTEST_HOLD_S), LONGEST_HOLD_S)


@dataclass
class _ServerApp:
    """A running ServerApp."""

    announces: bool = False
    unfinished_line: bytes = b""


class Arrivals:
    """Decides when a node's request for messages is forwarded to Flower."""

    def __init__(self) -> None:
        self._nodes: dict[int, _NodeRequests] = {}
        self._apps: dict[int, _ServerApp] = {}  # by descriptor of the pipe
        self._is_closed = False

    def follow(self, pipe: int) -> None:
        """Read a ServerApp's announcements from ``pipe`` until its process ends."""
        os.set_blocking(pipe, False)
        self._apps[pipe] = _ServerApp()
        asyncio.get_running_loop().add_reader(pipe, self._read, pipe)
        self._check_again(self._nodes.values())

    def close(self) -> None:
        """Answer all held requests, and hold none from now on."""
        self._is_closed = True
        self._check_again(self._nodes.values())

    def note_activity(self, node_id: int) -> None:
        """Note that a node is active: its next requests are held briefly."""
        self._node(node_id).active_at = time.monotonic()

    def forget(self, node_id: int) -> None:
        """Forget a node that has left."""
        node = self._nodes.pop(node_id, None)
        if node is not None and node.request is not None:
            node.request.set()
            node.request = None

    async def messages(
        self,
        node_id: int,
        ask_flower: Callable[[], Awaitable[bytes]],
        disconnected: Awaitable[object],
    ) -> bytes:
        """Return Flower's answer once it has a message, or b"" after the longest hold.

        Parameters
        ----------
        node_id
            A later request of the same node ends the earlier one, since its connection
            may be dead, and Flower hands out a message only once.
        ask_flower
            Returns b"" when Flower has no message.
        disconnected
            Completes when the node no longer waits for the answer.
        """
        node = self._node(node_id)
        end = time.monotonic() + node.hold_s
        leaving = asyncio.ensure_future(disconnected)
        try:
            with self._held(node) as request:
                is_last = False
                while not (is_last or self._is_closed or leaving.done()):
                    if node.request is not request:
                        break
                    request.clear()
                    is_last = time.monotonic() >= end
                    if self._should_ask(node):
                        answer = await self._ask(node, ask_flower)
                        if answer:
                            return answer
                    elif not is_last:
                        await self._pause(node, request, leaving, end)
            return b""
        finally:
            leaving.cancel()

    async def _ask(
        self, node: _NodeRequests, ask_flower: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        # Announcements from now on may come too late for this answer.
        num_announced, node.asked_at = node.num_announced, time.monotonic()
        answer = await ask_flower()
        if answer:
            node.active_at = time.monotonic()
            node.num_fetched = min(node.num_fetched + 1, node.num_announced)
        else:
            node.num_fetched = num_announced
        return answer

    def _should_ask(self, node: _NodeRequests) -> bool:
        is_announced = node.num_announced > node.num_fetched
        return is_announced or time.monotonic() >= self._next_at(node)

    def _next_at(self, node: _NodeRequests) -> float:
        """Return the time of the next request to Flower without an announcement."""
        if not self._apps:
            return math.inf
        announced = all(app.announces for app in self._apps.values())
        interval_s = CHECK_INTERVAL_S if announced else UNANNOUNCED_INTERVAL_S
        return node.asked_at + interval_s

    async def _pause(
        self,
        node: _NodeRequests,
        request: asyncio.Event,
        leaving: "asyncio.Future[object]",
        end: float,
    ) -> None:
        seconds = min(self._next_at(node), end) - time.monotonic()
        woken = asyncio.ensure_future(request.wait())
        try:
            await asyncio.wait(
                (woken, leaving),
                timeout=max(seconds, 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            woken.cancel()

    @contextlib.contextmanager
    def _held(self, node: _NodeRequests) -> Iterator[asyncio.Event]:
        if node.request is not None:
            node.request.set()
        node.request = request = asyncio.Event()
        try:
            yield request
        finally:
            if node.request is request:
                node.request = None

    def _node(self, node_id: int) -> _NodeRequests:
        if len(self._nodes) >= _MOST_REMEMBERED and node_id not in self._nodes:
            self._nodes = {
                other: node
                for other, node in self._nodes.items()
                if node.request is not None
            }
        return self._nodes.setdefault(node_id, _NodeRequests())

    def _read(self, pipe: int) -> None:
        try:
            text = os.read(pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        app = self._apps[pipe]
        if not text:  # the process has ended
            asyncio.get_running_loop().remove_reader(pipe)
            os.close(pipe)
            del self._apps[pipe]
            return
        app.announces = True
        *lines, app.unfinished_line = (app.unfinished_line + text).split(b"\n")
        nodes = [self._node(int(line)) for line in lines if line.isdigit()]
        for node in nodes:
            node.num_announced += 1
        self._check_again(nodes)

    def _check_again(self, nodes: Iterable[_NodeRequests]) -> None:
        for node in list(nodes):
            if node.request is not None:
                node.request.set()
