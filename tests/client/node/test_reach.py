import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from knnper.client.flower_node import Refusal
from knnper.client.node import require_server
from knnper.transport.credentials import (
    Identity,
    issue_server_certificate,
    new_authority,
)


@dataclass(frozen=True)
class Authority:
    """A CA whose files are in a folder."""

    folder: Path
    identity: Identity

    @property
    def file(self) -> Path:
        return self.folder / "ca.crt"

    def server(self, host: str = "127.0.0.1", days: int = 1) -> tuple[Path, Path]:
        """Return certificate and key of a server, as files."""
        files = self.folder / f"{days}.crt", self.folder / f"{days}.key"
        issue_server_certificate(self.identity, [host], days).write(*files)
        return files


def authority_in(folder: Path) -> Authority:
    folder.mkdir(exist_ok=True)
    made = Authority(folder, new_authority("a CA"))
    made.identity.write(made.file, folder / "ca.key")
    return made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return authority_in(tmp_path)


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
    assert "cannot be resolved" in str(_refusal("no-such-host.invalid:1", None))


@pytest.mark.parametrize(
    ("host", "days", "words"),
    [
        ("127.0.0.1", -1, "expired"),
        ("federation.example.org", 1, "federation.example.org, not for"),
    ],
)
def test_a_certificate_that_does_not_hold(
    authority: Authority, host: str, days: int, words: str
) -> None:
    with _answering(authority.server(host, days)) as address:
        assert words in str(_refusal(address, authority.file))


def test_the_wrong_authority_and_tls_on_one_side(
    authority: Authority, tmp_path: Path
) -> None:
    other = authority_in(tmp_path / "other").file
    for certificate, ca, words in (
        (authority.server(), other, "ca.crt"),
        (None, authority.file, "speaks HTTP without TLS"),
        (authority.server(days=2), None, "speaks TLS"),
    ):
        with _answering(certificate) as address:
            refusal = _refusal(address, ca)
        assert words in str(refusal)
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
