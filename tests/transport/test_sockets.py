"""Connections of peers that mean no good, to a server with little room."""

import asyncio
import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from knnper.transport.credentials import issue_server_certificate, new_authority
from knnper.transport.sockets import (
    Server,
    SocketLimits,
    introduce,
    listen,
    origin_of,
    read_pieces,
)

HOST, SOON = "127.0.0.1", 0.3
PATIENT = SocketLimits(strangers=4, strangers_per_address=3, known=3, header_s=30)
HASTY = replace(
    PATIENT, header_s=SOON, unread_s=SOON, body_grace_s=SOON, body_bytes_per_s=1e6
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 20_000_000


def known(name: str, path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Name: {name}\r\n\r\n".encode()


class Application:
    """Believes the header ``X-Name``; ``/busy`` is answered when it is told to."""

    def __init__(self, limits: SocketLimits) -> None:
        self.limits, self.go_on = limits, asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = request.headers.get("x-name")
        answer: Response = PlainTextResponse("hello")
        if name is not None and not introduce(scope, name):
            answer = PlainTextResponse("no room", 503)
        elif request.method == "POST" and request.url.path != "/unread":
            answer = await self._size(receive)
        elif request.url.path == "/busy":
            await self.go_on.wait()
        elif request.url.path == "/large":
            answer = Response(bytes(LARGE))
        await answer(scope, receive, send)

    async def _size(self, receive: Receive) -> Response:
        try:
            pieces = [len(one) async for one in read_pieces(receive, self.limits)]
        except (TimeoutError, ConnectionError) as error:
            return PlainTextResponse(type(error).__name__, 408)
        return PlainTextResponse(str(sum(pieces)))


class Served:
    """A server in a thread, and what the test has of it."""

    def __init__(self, limits: SocketLimits, tls: Path | None = None) -> None:
        self.app, self.ended = Application(limits), list[tuple[str, str]]()
        config = uvicorn.Config(
            self.app,
            log_config=None,
            lifespan="off",
            ws="none",
            ssl_certfile=None if tls is None else tls / "c",
            ssl_keyfile=None if tls is None else tls / "k",
        )
        self.server = Server(config, limits, lambda *told: self.ended.append(told))
        self.listening = listen(HOST, 0, "")
        self.place: tuple[str, int] = self.listening.getsockname()

    def connected(self, host: str = HOST, said: bytes = b"") -> socket.socket:
        """Return a connection from ``host``, any address of this machine."""
        made = socket.create_connection(self.place, timeout=5, source_address=(host, 0))
        made.sendall(said)
        return made


@contextlib.contextmanager
def serving(limits: SocketLimits, tls: Path | None = None) -> Iterator[Served]:
    served = Served(limits, tls)
    thread = threading.Thread(target=served.server.run, args=([served.listening],))
    thread.start()
    try:
        yield served
    finally:
        served.server.should_exit = True
        thread.join()


def answered(connection: socket.socket, said: bytes = b"") -> tuple[int, str]:
    """Return the status and the body of an answer; 0 if the connection ends."""
    try:
        connection.sendall(said)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode()
    except (ConnectionError, http.client.BadStatusLine):
        return 0, ""


def seconds_until_closed(connection: socket.socket) -> float:
    began = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return time.monotonic() - began


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(SOON)
    try:
        return connection.recv(1000) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_the_oldest_stranger_of_an_address_makes_room() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        first, second, third = (
            held.enter_context(served.connected()) for _ in range(3)
        )
        other = held.enter_context(served.connected("127.0.0.2"))
        fourth = held.enter_context(served.connected())
        assert seconds_until_closed(first) < 5
        assert all(map(is_open, (second, third, other, fourth)))
        assert answered(fourth, GET)[0] == 200
    assert [address for address, _ in served.ended] == [HOST]


def test_whoever_has_the_most_makes_room_for_other_addresses() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        first = held.enter_context(served.connected("127.0.0.2"))
        crowd = [held.enter_context(served.connected()) for _ in range(3)]
        last = held.enter_context(served.connected("127.0.0.3"))
        assert seconds_until_closed(crowd[0]) < 5
        assert all(map(is_open, (first, *crowd[1:], last)))


def test_strangers_do_not_take_the_place_of_those_who_are_known() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        ours = held.enter_context(served.connected())
        assert answered(ours, known("ann"))[0] == 200
        for _ in range(20):
            held.enter_context(served.connected(said=b"GET /"))
        late = held.enter_context(served.connected(said=known("ann")))
        assert answered(late)[0] == 200
        assert answered(ours, known("ann"))[0] == 200


def test_one_who_is_known_does_not_keep_out_another() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        crowd = [held.enter_context(served.connected()) for _ in range(3)]
        for number, connection in enumerate(crowd):
            said = known("ann", "/busy" if number == 0 else "/")
            connection.sendall(said)
            time.sleep(SOON / 3)
        # The one that is idle for the longest goes, not the one that is busy.
        bob = held.enter_context(served.connected(said=known("bob", "/busy")))
        time.sleep(SOON)
        assert answered(crowd[1])[0] == 200
        assert seconds_until_closed(crowd[1]) < 5
        cyd = held.enter_context(served.connected(said=known("cyd", "/busy")))
        time.sleep(SOON)
        # All are busy now: of no one's there are more than of those who would come.
        refused = held.enter_context(served.connected(said=known("cyd")))
        assert answered(refused)[0] == 503
        served.app.go_on.set()
        for connection in (crowd[0], bob, cyd):
            assert answered(connection)[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /", GET[:-2], b"\r\n"])
def test_a_header_has_to_end_in_time(said: bytes) -> None:
    with serving(HASTY) as served, served.connected(said=said) as connection:
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


def test_a_header_that_comes_byte_by_byte_does_not_gain_time() -> None:
    with (
        serving(HASTY) as served,
        served.connected() as connection,
        contextlib.suppress(OSError),
    ):
        for byte in GET:
            connection.sendall(bytes([byte]))
            time.sleep(SOON / 5)
        pytest.fail("the connection is still open")


def test_a_second_header_has_to_end_in_time_and_may_begin_late() -> None:
    with serving(HASTY) as served, served.connected(said=GET) as connection:
        assert answered(connection)[0] == 200
        time.sleep(2 * SOON)
        assert answered(connection, GET)[0] == 200
        connection.sendall(b"GET /")
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


@pytest.mark.parametrize("name", [b"X-Long: ", b"X: y\r\n"])
def test_a_header_has_an_end(name: bytes) -> None:
    piece = name * (100_000 // len(name))
    with serving(PATIENT) as served, served.connected(said=GET[:-2]) as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(100 * piece)
        assert not served.server.server_state.tasks


LIMIT = SocketLimits().header_bytes


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (b"GET /", b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Type: ", b"\r\n\r\n"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
            b"\r\n\r\n",
        ),
    ],
)
def test_header_of_8_kb_is_read_and_a_longer_one_is_refused(
    before: bytes, behind: bytes
) -> None:
    """The path, a field, a trailer; whole in one piece, which is read at once."""
    assert LIMIT == 8192
    with serving(PATIENT) as served:
        short = before + (LIMIT - 100) * b"x" + behind
        with served.connected(said=short) as connection:
            assert answered(connection)[0] == 200
        with served.connected(said=before + LIMIT * b"x" + behind) as connection:
            assert answered(connection)[0] == 431
            assert not is_open(connection)


def test_many_small_header_fields_are_refused() -> None:
    with serving(PATIENT) as served:
        said = GET[:-2] + LIMIT // 5 * b"X:\r\n" + b"\r\n"
        with served.connected(said=said) as connection:
            assert answered(connection)[0] == 431


def post(length: int, path: str = "/") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    )


def test_a_body_has_to_keep_a_pace() -> None:
    limits = replace(HASTY, unread_s=30)
    with serving(limits) as served, served.connected() as connection:
        connection.sendall(post(1_000_000))
        for _ in range(100):
            if select.select([connection], [], [], SOON / 10)[0]:
                break
            connection.sendall(b"x" * 1000)
        assert answered(connection) == (408, "TimeoutError")


def test_the_rest_of_a_body_that_is_not_read_has_to_come_in_time() -> None:
    with serving(HASTY) as served, served.connected() as connection:
        assert answered(connection, post(9, "/unread") + b"x") == (200, "hello")
        connection.sendall(b"x")
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


def test_who_does_not_read_the_answer_goes() -> None:
    with serving(HASTY) as served, served.connected() as connection:
        connection.sendall(known("ann", "/large"))
        time.sleep(4 * SOON)
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1_000_000):
                got += len(piece)
        assert got < LARGE


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("tls"), new_authority("tests")
    issue_server_certificate(authority, [HOST]).write(folder / "c", folder / "k")
    authority.write(folder / "ca", folder / "ca-key")
    return folder


@contextlib.contextmanager
def encrypted(served: Served, tls: Path) -> Iterator[socket.socket]:
    context = ssl.create_default_context(cafile=tls / "ca")
    with (
        served.connected() as plain,
        context.wrap_socket(plain, server_hostname=HOST) as connection,
    ):
        yield connection


def test_a_handshake_and_a_header_have_to_end_in_time_together(tls: Path) -> None:
    with serving(HASTY, tls) as served:
        with served.connected() as silent:
            assert SOON / 2 < seconds_until_closed(silent) < 10 * SOON
        with encrypted(served, tls) as connection:
            assert seconds_until_closed(connection) < 10 * SOON
        with encrypted(served, tls) as connection:
            assert answered(connection, GET)[0] == 200


def test_half_a_handshake_makes_room_too(tls: Path) -> None:
    with serving(PATIENT, tls) as served, contextlib.ExitStack() as held:
        silent = [held.enter_context(served.connected()) for _ in range(10)]
        with encrypted(served, tls) as connection:
            assert answered(connection, known("ann"))[0] == 200
        assert sum(map(is_open, silent)) <= PATIENT.strangers_per_address


def test_nothing_is_left_of_connections() -> None:
    with serving(PATIENT) as served:
        for said in (b"", GET, known("ann")):
            with served.connected(said=said):
                pass
        server, end = served.server, time.monotonic() + 5
        while server._visiting and time.monotonic() < end:
            time.sleep(0.01)
        assert not server._visiting
        assert (server.strangers._parties, server.known._parties) == ({}, {})


def test_a_server_that_stops_does_not_wait_for_half_open_connections() -> None:
    with contextlib.ExitStack() as held:
        with serving(PATIENT) as served:
            for said in (b"", b"GET /", GET, known("ann")):
                held.enter_context(served.connected(said=said))
            time.sleep(SOON)
            began = time.monotonic()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_of_one_origin(host: str, origin: str) -> None:
    assert origin_of(host) == origin
