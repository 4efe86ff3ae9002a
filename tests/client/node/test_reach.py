"""What keeps a node from its server, and whether it is worth another try."""

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from knnper.client.flower_node import Refusal
from knnper.client.node import require_server
from knnper.transport.credentials import (
    Identity,
    issue_server_certificate,
    new_authority,
)
from tests.client.doctor.scripted_server import Script, answering, written

AUTHORITY, OTHER = new_authority("a CA"), new_authority("another CA")
GOOD = issue_server_certificate(AUTHORITY, ["127.0.0.1"])
EXPIRED = issue_server_certificate(AUTHORITY, ["127.0.0.1"], -1)
ELSEWHERE = issue_server_certificate(AUTHORITY, ["federation.example.org"])


def refusal(address: str, ca: Path | None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        require_server(address, ca)
    return caught.value


@pytest.mark.parametrize("serves", [GOOD, None])
def test_a_server_as_it_should_be(tmp_path: Path, serves: Identity | None) -> None:
    files = None if serves is None else written(tmp_path, serves, "server")
    ca = None if serves is None else written(tmp_path, AUTHORITY, "ca")[0]
    with answering(Script(), files) as address:
        require_server(address, ca)


@pytest.mark.parametrize(
    ("serves", "trusts", "words"),
    [
        (EXPIRED, AUTHORITY, "expired"),
        (ELSEWHERE, AUTHORITY, "federation.example.org, not for"),
        (GOOD, OTHER, "ca.crt"),
        (None, AUTHORITY, "speaks HTTP without TLS"),
        (GOOD, None, "speaks TLS"),
        (GOOD, "missing", "ca.crt"),
        (GOOD, "damaged", "ca.crt"),
    ],
)
def test_what_trying_again_would_not_mend(
    tmp_path: Path, serves: Identity | None, trusts: Identity | str | None, words: str
) -> None:
    files = None if serves is None else written(tmp_path, serves, "server")
    ca = None if trusts is None else tmp_path / "ca.crt"
    if isinstance(trusts, Identity):
        written(tmp_path, trusts, "ca")
    elif trusts == "damaged":
        (tmp_path / "ca.crt").write_text("no certificate")
    with answering(Script(), files) as address:
        found = refusal(address, ca)
    assert words in str(found)
    assert found.lasting


def test_nobody_there_or_whoever_hangs_up_is_worth_another_try(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not refusal(address, written(tmp_path, AUTHORITY, "ca")[0]).lasting
        assert not refusal(address, None).lasting
        listening.shutdown(socket.SHUT_RDWR)
    gone = refusal(address, None)
    assert ("nothing listens at" in str(gone), gone.lasting) == (True, False)
    assert "cannot be resolved" in str(refusal("no-such-host.invalid:1", None))
