import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from knnper.client.flower_node import Refusal
from knnper.client.node import require_server
from tests.client.node.own_authority import HOUR, NOW, Authority, new_authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority(tmp_path)


@contextlib.contextmanager
def _answering(certificate: tuple[Path, Path] | None) -> Iterator[str]:
    """Give the address of a server that speaks TLS, or HTTP without a certificate."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_answer, args=(listening, certificate)).start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def _answer(listening: socket.socket, certificate: tuple[Path, Path] | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                if certificate is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                with connection:
                    if b"GET" in connection.recv(1024):
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")


def _refusal(address: str, ca: Path | None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        require_server(address, ca)
    return caught.value


def test_a_server_as_it_should_be(authority: Authority) -> None:
    with _answering(authority.server()) as address:
        require_server(address, authority.file)
    with _answering(None) as address:
        require_server(address, None)


def test_nobody_there_is_worth_another_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    refusal = _refusal(address, None)
    assert "nothing listens at" in str(refusal)
    assert not refusal.lasting


def test_whoever_hangs_up_is_worth_another_try(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not _refusal(address, authority.file).lasting
        assert not _refusal(address, None).lasting
        listening.shutdown(socket.SHUT_RDWR)


def test_an_unknown_name() -> None:
    refusal = _refusal("no-such-host.invalid:1", None)
    assert "the name no-such-host.invalid cannot be resolved" in str(refusal)


@pytest.mark.parametrize(
    ("host", "lasts", "authority_of", "said"),
    [
        ("127.0.0.1", HOUR, "other", "ca.crt"),
        ("127.0.0.1", -HOUR, "own", "expired"),
        ("federation.example.org", HOUR, "own", "federation.example.org, not for"),
    ],
)
def test_certificates_that_are_not_accepted(
    host: str,
    lasts: timedelta,
    authority_of: str,
    said: str,
    authority: Authority,
    tmp_path: Path,
) -> None:
    ca = {"own": authority, "other": new_authority(tmp_path / "other")}[authority_of]
    with _answering(authority.server(host, NOW + lasts)) as address:
        refusal = _refusal(address, ca.file)
    assert said in str(refusal)
    assert refusal.lasting


def test_tls_to_a_plain_server_and_the_other_way_round(authority: Authority) -> None:
    with _answering(None) as address:
        refusal = _refusal(address, authority.file)
    assert "speaks HTTP without TLS" in str(refusal)
    assert refusal.lasting
    with _answering(authority.server()) as address:
        refusal = _refusal(address, None)
    assert "speaks TLS" in str(refusal)
    assert refusal.lasting


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_that_cannot_be_read(
    tmp_path: Path, content: str | None, authority: Authority
) -> None:
    certificate = authority.server()
    authority.file.unlink()
    if content is not None:
        authority.file.write_text(content)
    with _answering(certificate) as address:
        refusal = _refusal(address, authority.file)
    assert "ca.crt" in str(refusal)
    assert refusal.lasting
