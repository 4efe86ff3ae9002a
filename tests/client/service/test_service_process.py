"""The service and its tokens as they are typed, in processes of their own."""

import contextlib
import json
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.client.service.tokens import Tokens
from knnper.client.site_state import SiteState
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.data.site_task import SiteTask
from knnper.transport.credentials import issue_server_certificate, new_authority
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    some_inputs,
    some_labels,
    tiny_model,
)
from tests.processes import KNNPER, Commands

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {name: image_folder, path: data}
service: {port: 0, tls: {certificate: c, key: k}}
"""


@contextlib.contextmanager
def serve_process(folder: Path) -> Iterator[httpx.Client]:
    """Give a client, which has the token, of ``knnper site serve`` in a process."""
    train = NamedExamples(Examples(some_inputs(6), some_labels(6)), tuple("abcdef"))
    none = NamedExamples(Examples(some_inputs(0), some_labels(0)), ())
    data = SiteData(train, none, none, SiteTask(IMAGE, CLASSES, ()))
    SiteState(folder / "state", "site-a").install(tiny_model(), data, took_part=False)
    config, authority = folder / "client.yaml", new_authority("tests")
    config.write_text(FILE)
    issue_server_certificate(authority, ["127.0.0.1"]).write(folder / "c", folder / "k")
    authority.write(folder / "ca", folder / "ca-key")
    with Commands(folder / "logs") as commands:
        process = commands.start("serve", [KNNPER, "site", "serve", config])
        address = process.wait_for(r"serves at.* (\S+)\n")
        process.wait_for("serving the model")
        # The folder of its data is gone, and it serves all the same.
        process.wait_for(
            "The data cannot be compared with the memory: .* does not exist"
        )
        token = (folder / "state" / "token").read_text().strip()
        with httpx.Client(
            base_url=address,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=folder / "ca"),
            timeout=10,
        ) as client:
            yield client
        assert process.stop() == 0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "client.yaml"
    path.write_text(FILE)
    return path


def token(config: Path, command: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["site", "token", command, str(config), *words])


def test_tokens_are_made_listed_and_revoked(config: Path) -> None:
    narrow = token(config, "add", "tablet")
    wide = token(config, "add", "ward", "--scope", "delete", "--scope", "add")
    assert (narrow.exit_code, wide.exit_code) == (0, 0)
    tokens = Tokens(config.parent / "state", "a token of the owner's")
    caller = tokens.caller(f"Bearer {narrow.stdout.strip()}")
    assert caller is not None
    assert (caller.name, list(caller.scopes)) == ("tablet", ["predict"])
    listed = json.loads(token(config, "list", "--json").stdout)
    assert [(row["name"], row["scopes"]) for row in listed] == [
        ("tablet", "predict"),
        ("ward", "add, delete"),
    ]
    assert "tablet" in token(config, "list").stdout
    assert token(config, "revoke", "tablet").exit_code == 0
    assert tokens.caller(f"Bearer {narrow.stdout.strip()}") is None
    assert tokens.caller(f"Bearer {wide.stdout.strip()}") is not None


def test_what_is_no_scope_is_refused(config: Path) -> None:
    result = token(config, "add", "tablet", "--scope", "neighbours")
    assert result.exit_code == 2
    assert "neighbors" in result.output
    assert token(config, "revoke", "tablet").exit_code == 1


def test_no_token_is_refused_where_others_can_ask(config: Path) -> None:
    command = ["site", "serve", str(config), "--no-token", "--set", "service.tls=null"]
    result = CliRunner().invoke(app, [*command, "--set", "service.host=0.0.0.0"])
    assert result.exit_code == 1
    assert "expected a loopback" in result.output
    assert "Warning: 0.0.0.0 is open to other machines, without TLS" in result.output


NUM_HALF_OPEN, NUM_ASKED = 300, 20
BODY = {"inputs": some_inputs(1).tolist()}
HALVES = {
    "nothing": b"",
    "a part of a header": b"POST /predict HTTP/1.1\r\nHost: localhost\r\n",
    "a body without a token": b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
    "a request for the page": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def half_open(client: httpx.Client, sent: bytes, tls: ssl.SSLContext) -> socket.socket:
    place = (client.base_url.host, client.base_url.port or 0)
    connection = socket.create_connection(place, timeout=10)
    if sent:  # without words not even TLS begins
        connection = tls.wrap_socket(connection)
        connection.sendall(sent)
    return connection


@pytest.mark.integration
def test_half_open_connections_do_not_keep_token_holders_out(tmp_path: Path) -> None:
    halves, close = list(HALVES.values()), {"Connection": "close"}
    with serve_process(tmp_path) as client, contextlib.ExitStack() as held:
        tls = ssl.create_default_context(cafile=tmp_path / "ca")
        tls.check_hostname = False
        for number in range(NUM_HALF_OPEN):
            half = halves[number % len(halves)]
            held.enter_context(half_open(client, half, tls))
        answers = [
            client.post("/predict", json=BODY, headers=close).json()["num_stored"]
            for _ in range(NUM_ASKED)
        ]
    assert answers == [6] * NUM_ASKED


def long_header(name: str, value: str) -> bytes:
    line = "POST /predict" if name == "Content-Type" else "GET /health"
    header = f"{line} HTTP/1.1\r\nHost: localhost\r\n{name}: {value}\r\n"
    return f"{header}Content-Length: 0\r\n\r\n".encode()


LONG = [
    # What parsers of the standard library need quadratic time for.
    long_header("Cookie", f'a="{62_000 * chr(92)}"'),
    long_header("Cookie", f'a="{7_900 * chr(92)}"'),
    long_header("Content-Type", f'multipart/form-data; a="{62_000 * ";"}'),
    long_header("Content-Type", f'multipart/form-data; a="{7_900 * ";"}'),
]
SHORT = [long_header("Cookie", "a=b"), long_header("Content-Type", "image/png")]


def median_s(
    client: httpx.Client, strangers: Sequence[bytes], tls: ssl.SSLContext
) -> float:
    """Return the owner's median time while two strangers ask again and again."""
    over, seconds = threading.Event(), list[float]()

    def ask(number: int) -> int:
        count = 0
        while not over.is_set():
            sent = strangers[(number + count) % len(strangers)]
            with (
                contextlib.suppress(OSError),
                half_open(client, sent, tls) as connection,
            ):
                connection.recv(1000)
                count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, number) for number in range(2)]
        try:
            for _ in range(NUM_ASKED):
                began = time.perf_counter()
                client.post("/predict", json=BODY).raise_for_status()
                seconds.append(time.perf_counter() - began)
        finally:
            over.set()
        assert all(future.result() for future in asking)
    return statistics.median(seconds)


@pytest.mark.slow
def test_long_headers_of_strangers_do_not_hold_up_the_owner(tmp_path: Path) -> None:
    with serve_process(tmp_path) as client:
        tls = ssl.create_default_context(cafile=tmp_path / "ca")
        tls.check_hostname = False
        usual = median_s(client, SHORT, tls)
        assert median_s(client, LONG, tls) < 5 * usual
        # Within the limit for headers the token is what counts.
        for request, status in zip(LONG, (431, 200, 431, 401), strict=True):
            with half_open(client, request, tls) as stranger:
                assert stranger.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())
