"""Connections of slow or greedy peers to a server with tight limits."""

import contextlib
import http.client
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

from knnper.server.link.connections import ConnectionLimits, ConnectionServer
from knnper.transport.credentials import issue_server_certificate, new_authority
from knnper.transport.sockets import listen
from tests.server.link.peers import seconds_until_closed

HOST, SOON = "127.0.0.1", 0.3
PATIENT = ConnectionLimits(in_all=4, per_address=3, header_s=30)
HASTY = replace(PATIENT, header_s=SOON, unread_s=SOON)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 20_000_000


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's size; ``/large`` much, ``/unread`` without the body."""
    request = Request(scope, receive)
    answer: Response = PlainTextResponse("hello")
    if request.url.path == "/large":
        answer = Response(bytes(LARGE))
    elif request.method == "POST" and request.url.path != "/unread":
        answer = PlainTextResponse(str(len(await request.body())))
    await answer(scope, receive, send)


class Served:
    """A server, and the parts that a test needs of it."""

    def __init__(self, limits: ConnectionLimits, tls: Path | None = None) -> None:
        self.refused = list[tuple[str, str]]()
        config = uvicorn.Config(
            application,
            log_config=None,
            lifespan="off",
            ws="none",
            ssl_certfile=None if tls is None else tls / "c",
            ssl_keyfile=None if tls is None else tls / "k",
        )
        self.server = ConnectionServer(
            config, limits, lambda *refusal: self.refused.append(refusal)
        )
        self.listening = listen(HOST, 0, "")
        self.place: tuple[str, int] = self.listening.getsockname()

    def connected(self, host: str = HOST, sent: bytes = b"") -> socket.socket:
        """Return a connection from ``host``, any address of this machine."""
        connection = socket.create_connection(
            self.place, timeout=5, source_address=(host, 0)
        )
        connection.sendall(sent)
        return connection


@contextlib.contextmanager
def serving(limits: ConnectionLimits, tls: Path | None = None) -> Iterator[Served]:
    served = Served(limits, tls)
    thread = threading.Thread(target=served.server.run, args=([served.listening],))
    thread.start()
    try:
        yield served
    finally:
        served.server.should_exit = True
        thread.join()


def answered(connection: socket.socket, sent: bytes = b"") -> tuple[int, str]:
    """Return the status and the body of an answer; 0 if the connection ends."""
    try:
        connection.sendall(sent)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode()
    except (ConnectionError, http.client.BadStatusLine):
        return 0, ""


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(SOON)
    try:
        return connection.recv(1000) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_connection_above_the_limit_of_an_address_is_closed() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        crowd = [held.enter_context(served.connected()) for _ in range(3)]
        refused = held.enter_context(served.connected())
        assert seconds_until_closed(refused) < 5
        other = held.enter_context(served.connected("127.0.0.2"))
        assert answered(other, GET)[0] == 200
        assert all(map(is_open, crowd))
    assert [address for address, _ in served.refused] == [HOST]


def test_connection_above_the_limit_in_all_is_closed_until_another_ends() -> None:
    with serving(PATIENT) as served, contextlib.ExitStack() as held:
        crowd = [
            held.enter_context(served.connected(f"127.0.0.{number}"))
            for number in range(2, 6)
        ]
        with served.connected() as refused:
            assert seconds_until_closed(refused) < 5
        assert all(map(is_open, crowd))
        crowd.pop().close()
        end = time.monotonic() + 5
        while len(served.server._connections) > 3 and time.monotonic() < end:
            time.sleep(0.01)
        with served.connected() as late:
            assert answered(late, GET)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /", GET[:-2], b"\r\n"])
def test_a_header_has_to_end_in_time(sent: bytes) -> None:
    with serving(HASTY) as served, served.connected(sent=sent) as connection:
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
    with serving(HASTY) as served, served.connected(sent=GET) as connection:
        assert answered(connection)[0] == 200
        time.sleep(2 * SOON)
        assert answered(connection, GET)[0] == 200
        connection.sendall(b"GET /")
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


@pytest.mark.parametrize("name", [b"X-Long: ", b"X: y\r\n"])
def test_a_header_has_an_end(name: bytes) -> None:
    piece = name * (100_000 // len(name))
    with serving(PATIENT) as served, served.connected(sent=GET[:-2]) as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(100 * piece)
        assert not served.server.server_state.tasks


LIMIT = ConnectionLimits().header_bytes


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
        with served.connected(sent=short) as connection:
            assert answered(connection)[0] == 200
        with served.connected(sent=before + LIMIT * b"x" + behind) as connection:
            assert answered(connection)[0] == 431
            assert not is_open(connection)


def test_many_small_header_fields_are_refused() -> None:
    with serving(PATIENT) as served:
        sent = GET[:-2] + LIMIT // 5 * b"X:\r\n" + b"\r\n"
        with served.connected(sent=sent) as connection:
            assert answered(connection)[0] == 431


def post(length: int, path: str = "/") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    )


def test_the_rest_of_a_body_that_is_not_read_has_to_come_in_time() -> None:
    with serving(HASTY) as served, served.connected() as connection:
        assert answered(connection, post(9, "/unread") + b"x") == (200, "hello")
        connection.sendall(b"x")
        assert SOON / 2 < seconds_until_closed(connection) < 10 * SOON


def test_connection_that_reads_no_answer_is_closed() -> None:
    with serving(HASTY) as served, served.connected() as connection:
        connection.sendall(GET.replace(b"/", b"/large", 1))
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


def test_half_a_handshake_counts_as_a_connection(tls: Path) -> None:
    with serving(PATIENT, tls) as served, contextlib.ExitStack() as held:
        silent = [held.enter_context(served.connected()) for _ in range(10)]
        assert sum(map(is_open, silent)) == PATIENT.per_address


def test_nothing_is_left_of_connections() -> None:
    with serving(PATIENT) as served:
        for sent in (b"", GET):
            with served.connected(sent=sent):
                pass
        server, end = served.server, time.monotonic() + 5
        while server._num_of_origin and time.monotonic() < end:
            time.sleep(0.01)
        assert not server._connections
        assert not server._num_of_origin


def test_a_server_that_stops_does_not_wait_for_half_open_connections() -> None:
    with contextlib.ExitStack() as held:
        with serving(PATIENT) as served:
            for sent in (b"", b"GET /", GET):
                held.enter_context(served.connected(sent=sent))
            time.sleep(SOON)
            began = time.monotonic()
        assert time.monotonic() - began < 5
