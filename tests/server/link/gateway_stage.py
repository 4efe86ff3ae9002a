"""A gateway that listens, with something that stands for Flower behind it."""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop

from knnper.server.link.arrivals import Arrivals
from knnper.server.link.authorized import Registered
from knnper.server.link.connections import ConnectionLimits
from knnper.server.link.gateway import Gateway
from knnper.server.link.gateway_rules import RegisteredClients, Rules
from knnper.server.link.listener import Listener
from knnper.server.link.notices import Notices
from knnper.server.link.replies import Replies
from knnper.server.link.request_limits import Meter
from knnper.server.settings import TlsFiles
from knnper.transport.credentials import Address, fingerprint, new_node_key
from knnper.transport.sockets import listen
from tests.processes import LOCALHOST, free_port
from tests.server.link.peers import Peer

LARGEST = 10_000_000
KEY, NODE = new_node_key(), 7
ROSTER = {str(NODE): Registered("site-a", fingerprint(KEY.public_key()))}
PIECE = 65_536


@dataclass
class Upstream:
    """Stands for Flower: records requests, and answers with the fields that are set."""

    status: int = 200
    content: bytes | None = None
    error: httpx.HTTPError | None = None
    seen: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.error is not None:
            raise self.error
        self.seen.append((request.method, request.url.raw_path.decode()))
        self.headers = dict(request.headers)
        body = await request.aread() if self.content is None else self.content
        headers = {"content-type": "application/x", "x-internal": "1"}
        return httpx.Response(self.status, content=_pieces(body), headers=headers)

    def reset(self) -> None:
        """Forget the recorded requests and the answer that was set."""
        self.status, self.error, self.content = 200, None, None
        self.seen.clear()
        self.headers.clear()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


@dataclass
class Stage:
    """A gateway that serves, and the parts that a test needs of it."""

    upstream: Upstream
    address: Address
    clients: RegisteredClients
    client: Peer
    http: httpx.Client
    looked: list[bool]
    listener: Listener
    gateway: Gateway
    server_app: int  # the pipe of a ServerApp that has announced nothing so far

    def announce(self, *nodes: int) -> None:
        """Announce messages for nodes, as the ServerApp; without nodes, its begin."""
        os.write(
            self.server_app, "".join(f"{node}\n" for node in nodes).encode() or b"\n"
        )

    def note_heartbeat(self) -> None:
        """Make the gateway send no heartbeat with the next requests for messages."""
        self.gateway._heartbeat_at[NODE] = time.monotonic()

    def forget_heartbeat(self) -> None:
        """Make the gateway send a heartbeat with the next request for messages."""
        self.gateway._heartbeat_at.clear()

    def connected(self, host: str = LOCALHOST) -> socket.socket:
        """Return a connection from ``host``, any address of this machine."""
        place, source = (self.address.host, self.address.port), (host, 0)
        return socket.create_connection(place, timeout=5, source_address=source)

    def first_line(self, request: bytes) -> bytes:
        """Send bytes as they are; return the first line of the answer."""
        with self.connected() as connection:
            connection.sendall(request)
            return connection.recv(1000).partition(b"\r\n")[0]


@contextlib.contextmanager
def gateway_stage(
    insecure: bool = False,
    tls: TlsFiles | None = None,
    limits: ConnectionLimits | None = None,
) -> Iterator[Stage]:
    address = Address(LOCALHOST, free_port())
    upstream, clients, looked = Upstream(), RegisteredClients(), list[bool]()
    clients.learn(ROSTER)
    transport = httpx.MockTransport(upstream.answer)
    behind = httpx.AsyncClient(base_url="http://flower", transport=transport)
    notices = Notices()
    gateway = Gateway(
        behind,
        Rules(insecure, LARGEST, clients),
        Replies(behind, Path(tempfile.gettempdir()), None, notices.warn),
        Meter(4 * LARGEST, 2 * LARGEST, LARGEST),
        lambda: looked.append(True),
        notices,
        Arrivals(),
    )
    url = f"http://{address}"
    listener = Listener(gateway, tls, limits or ConnectionLimits())
    reading, server_app = os.pipe()
    with (
        _serving(listener, address, lambda: gateway.arrivals.follow(reading)),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        client = Peer(KEY, http, NODE)
        stage = Stage(
            upstream,
            address,
            clients,
            client,
            http,
            looked,
            listener,
            gateway,
            server_app,
        )
        stage.note_heartbeat()
        yield stage
        os.close(server_app)


@contextlib.contextmanager
def _serving(
    listener: Listener, address: Address, prepare: Callable[[], None]
) -> Iterator[None]:
    listening = listen(address.host, address.port)
    loops: list[asyncio.AbstractEventLoop] = []
    tasks: list[asyncio.Task[None]] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        prepare()
        tasks.append(asyncio.create_task(listener.serve_until_cancelled(listening)))
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loops[0].call_soon_threadsafe(tasks[0].cancel)
        thread.join()
        listening.close()
