import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.client.doctor import Connection
from knnper.transport.credentials import issue_server_certificate, new_authority
from knnper.transport.diagnosis import GATEWAY_HEADERS, Verdict
from tests.client.doctor.scripted_server import Script, answering, told, written

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    identity = issue_server_certificate(new_authority("CA"), ["127.0.0.1"])
    return written(tmp_path_factory.mktemp("tls"), identity, "server")


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[str]:
    """Give the address of other software, which says ``words`` and hangs up."""

    def talk() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=talk)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_gateway_as_it_should_be(files: tuple[Path, Path]) -> None:
    with answering(Script(), files) as server:
        connection = Connection(server, with_tls=True)
        for check in (
            connection.name_resolves,
            connection.port_is_open,
            connection.tls_is_agreed,
            connection.gateway_answers,
            connection.clocks_agree,
            connection.versions_agree,
        ):
            told(check(), OK)


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("no-such-host.invalid:1", "no-such-host.invalid cannot be resolved"),
        ("host:0", "expected HOST:PORT"),
    ],
)
def test_names_that_stand_for_nothing(server: str, found: str) -> None:
    finding = Connection(server, with_tls=True).name_resolves()
    told(finding, PROBLEM, found, "correct `server`")


def test_a_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("federation.example.org:8443", with_tls=True)
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "")
    mend = "export NO_PROXY=federation.example.org"
    told(connection.no_proxy_is_between(), WARNING, "proxy.example.org:3128", mend)
    monkeypatch.setenv("no_proxy", "federation.example.org")
    told(connection.no_proxy_is_between(), OK)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = f"127.0.0.1:{listening.getsockname()[1]}"
    finding = Connection(server, with_tls=True).port_is_open()
    told(finding, PROBLEM, f"nothing listens at {server}", "start the server there")


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (TimeoutError("timed out"), "let TCP port 1 through the firewalls"),
        (OSError(113, "No route to host"), "mend this machine's network"),
    ],
)
def test_no_way_to_the_server(
    monkeypatch: pytest.MonkeyPatch, error: OSError, mend: str
) -> None:
    def fail(*args: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    finding = Connection("127.0.0.1:1", with_tls=True).port_is_open()
    told(finding, PROBLEM, "127.0.0.1:1", mend)


@pytest.mark.parametrize(
    ("serves_tls", "with_tls", "verdict", "found", "mend"),
    [
        (True, False, PROBLEM, "speaks TLS", "remove `insecure: true`"),
        (False, True, PROBLEM, "speaks HTTP without TLS", "started with `tls`"),
        (False, False, WARNING, "insecure: true", "fed init"),
    ],
)
def test_tls_on_one_side_or_none(
    files: tuple[Path, Path],
    serves_tls: bool,
    with_tls: bool,
    verdict: Verdict,
    found: str,
    mend: str,
) -> None:
    with answering(Script(), files if serves_tls else None) as server:
        finding = Connection(server, with_tls=with_tls).tls_is_agreed()
    told(finding, verdict, found, mend)


@pytest.mark.parametrize("with_tls", [True, False])
def test_software_that_speaks_neither(with_tls: bool) -> None:
    with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as server:
        finding = Connection(server, with_tls=with_tls).tls_is_agreed()
    told(finding, PROBLEM, "other software has the port", "correct `server`")


FLOWERS_OWN = {"/health": (200, ""), "/v1/control/list-nodes": (405, "")}


@pytest.mark.parametrize(
    ("script", "verdict", "found", "mend"),
    [
        (Script({}, FLOWERS_OWN), PROBLEM, "is Flower's own port", "correct `server`"),
        (Script({}, {}), PROBLEM, "HTTP status 404", "correct `server`"),
        (Script({}), WARNING, "is no gateway of knnper's", "correct `server`"),
        (
            Script(answers={"/health": (503, "")}),
            PROBLEM,
            "Flower behind it does not (HTTP status 503)",
            "superlink.log",
        ),
    ],
)
def test_who_is_behind_the_port(
    script: Script, verdict: Verdict, found: str, mend: str
) -> None:
    with answering(script, None) as server:
        finding = Connection(server, with_tls=False).gateway_answers()
    told(finding, verdict, found, mend)


@pytest.mark.parametrize(
    ("server_ahead_s", "verdict", "seconds", "direction"),
    [
        (0, OK, 0, ""),
        (-3.5, WARNING, 3.5, "ahead of"),
        (-30, PROBLEM, 30, "ahead of"),
        (200, WARNING, 200, "behind"),
        (400, PROBLEM, 400, "behind"),
    ],
)
def test_clocks(
    server_ahead_s: float, verdict: Verdict, seconds: float, direction: str
) -> None:
    with answering(Script(ahead_s=server_ahead_s), None) as server:
        finding = Connection(server, with_tls=False).clocks_agree()
    if verdict is OK:
        told(finding, OK, "within")
        return
    told(finding, verdict, direction, "NTP")
    # The server tells whole seconds.
    found = finding.found.split(" clock is ")[1].split(" s ")[0]
    assert abs(float(found) - seconds) <= 0.75


def test_another_version() -> None:
    headers = {GATEWAY_HEADERS["knnper"]: "0.1.0", GATEWAY_HEADERS["flwr"]: "1.30.0"}
    with answering(Script(headers), None) as server:
        finding = Connection(server, with_tls=False).versions_agree()
    told(finding, PROBLEM, "flwr 1.30.0 on the server", "the same versions")
