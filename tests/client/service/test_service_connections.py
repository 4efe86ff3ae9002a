"""Whoever has the token is served, whatever others do with their connections."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.client.service.serve_process import serve_process
from tests.client.service.small_service import some_inputs

NUM_HALF_OPEN, NUM_ASKED = 300, 20
BODY = {"inputs": some_inputs(1).tolist()}
HALVES = {
    "nothing": b"",
    "a part of a header": b"POST /predict HTTP/1.1\r\nHost: localhost\r\n",
    "a body without a token": b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
    "a request for the page": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def half_open(
    client: httpx.Client, said: bytes, tls: ssl.SSLContext | None
) -> socket.socket:
    place = (client.base_url.host, client.base_url.port or 0)
    connection = socket.create_connection(place, timeout=10)
    if tls is not None:
        connection = tls.wrap_socket(connection, server_hostname=place[0])
    connection.sendall(said)
    return connection


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_half_open_connections_do_not_keep_token_holders_out(
    tmp_path: Path, tls: bool
) -> None:
    halves, stop = list(HALVES.values()), threading.Event()

    def go_on(client: httpx.Client, held: contextlib.ExitStack) -> None:
        """Open more and more, of which not even TLS begins."""
        while not stop.wait(0.005):
            held.enter_context(half_open(client, b"", None))

    with (
        serve_process(tmp_path, tls=tls) as client,
        contextlib.ExitStack() as held,
        ThreadPoolExecutor(1) as attacker,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(stop.set)
        context = ssl.create_default_context(cafile=tmp_path / "ca") if tls else None
        kept = held.enter_context(contextlib.closing(kept_connection(client, context)))
        before = ask_on(kept, client)
        for number in range(NUM_HALF_OPEN):
            half = halves[number % len(halves)]
            held.enter_context(half_open(client, half, context))
        attacker.submit(go_on, client, held)
        close = {"Connection": "close"}
        answers = [
            client.post("/predict", json=BODY, headers=close).status_code
            for _ in range(NUM_ASKED)
        ]
        after = ask_on(kept, client)
    assert (before, answers, after) == (200, [200] * NUM_ASKED, 200)


def kept_connection(
    client: httpx.Client, tls: ssl.SSLContext | None
) -> http.client.HTTPConnection:
    """Return a connection that is never opened again."""
    host, port = client.base_url.host, client.base_url.port
    if tls is None:
        kept = http.client.HTTPConnection(host, port, timeout=10)
    else:
        kept = http.client.HTTPSConnection(host, port, timeout=10, context=tls)
    kept.connect()
    kept.auto_open = 0
    return kept


def ask_on(kept: http.client.HTTPConnection, client: httpx.Client) -> int:
    bearer = client.headers["Authorization"]
    headers = {"Authorization": bearer, "Content-Type": "application/json"}
    kept.request("POST", "/predict", json.dumps(BODY), headers)
    answer = kept.getresponse()
    answer.read()
    return answer.status
