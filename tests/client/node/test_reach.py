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
    assert "cannot be resolved" in str(_refusal("no-such-host.invalid:1", None))


@pytest.mark.parametrize(
    ("host", "days", "words"),
    [
        ("127.0.0.1", -1, "has expired"),
        ("127.0.0.1", -1, "renew it on the server, or set this machine's clock"),
        ("federation.example.org", 1, "use a name in `server`"),
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
        (authority.server(), other, "copy the federation's ca.crt"),
        (None, authority.file, "does not speak TLS"),
        (authority.server(days=2), None, "does not speak plain HTTP"),
    ):
        with _answering(certificate) as address:
            refusal = _refusal(address, ca)
        assert words in str(refusal)
        assert refusal.lasting


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    with _answering(None) as address:
        refusal = _refusal(address, tmp_path / "ca.crt")
        socket.create_connection(address.split(":")).close()  # type: ignore[arg-type]
    assert "cannot be read" in str(refusal)
