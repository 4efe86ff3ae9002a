import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
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
        thread = threading.Thread(target=_answer_one, args=(listening, certificate))
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def _answer_one(
    listening: socket.socket, certificate: tuple[Path, Path] | None
) -> None:
    connection, _ = listening.accept()
    with connection, contextlib.suppress(OSError):
        if certificate is None:
            connection.recv(1024)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        context.wrap_socket(connection, server_side=True).close()


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
    assert "nothing answers at" in str(refusal)
    assert not refusal.lasting


def test_an_unknown_name() -> None:
    refusal = _refusal("no-such-host.invalid:1", None)
    assert "the name no-such-host.invalid cannot be resolved" in str(refusal)


def test_the_wrong_authority(authority: Authority, tmp_path: Path) -> None:
    other = new_authority(tmp_path / "other")
    with _answering(authority.server()) as address:
        refusal = _refusal(address, other.file)
    assert "copy the federation's ca.crt" in str(refusal)
    assert refusal.lasting


def test_an_expired_certificate(authority: Authority) -> None:
    with _answering(authority.server(ends=NOW - HOUR)) as address:
        refusal = _refusal(address, authority.file)
    assert "has expired" in str(refusal)
    assert "renew it on the server, or set this machine's clock" in str(refusal)


def test_a_certificate_for_another_name(authority: Authority) -> None:
    with _answering(authority.server("federation.example.org")) as address:
        refusal = _refusal(address, authority.file)
    assert "use a name in `server` that the certificate holds" in str(refusal)


def test_tls_to_a_plain_server_and_the_other_way_round(authority: Authority) -> None:
    with _answering(None) as address:
        refusal = _refusal(address, authority.file)
    assert "does not speak TLS" in str(refusal)
    assert refusal.lasting
    with _answering(authority.server()) as address:
        refusal = _refusal(address, None)
    assert "does not speak plain HTTP" in str(refusal)
    assert refusal.lasting


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    with _answering(None) as address:
        refusal = _refusal(address, tmp_path / "ca.crt")
        socket.create_connection(address.split(":")).close()  # type: ignore[arg-type]
    assert "cannot be read" in str(refusal)
