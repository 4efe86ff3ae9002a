import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.client.doctor import Connection
from knnper.transport.credentials import issue_server_certificate, new_authority
from knnper.transport.diagnosis import GATEWAY_HEADERS, Finding, Verdict
from tests.client.doctor.scripted_server import Script, answering, written


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    identity = issue_server_certificate(new_authority("CA"), ["127.0.0.1"])
    return written(tmp_path_factory.mktemp("tls"), identity, "server")


def is_problem(finding: Finding, found: str, mend: str) -> None:
    assert finding.verdict is Verdict.PROBLEM
    assert found in finding.found
    assert mend in finding.mend


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
            assert check().verdict is Verdict.OK


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("no-such-host.invalid:1", "no-such-host.invalid cannot be resolved"),
        ("host:0", "expected HOST:PORT"),
    ],
)
def test_names_that_stand_for_nothing(server: str, found: str) -> None:
    finding = Connection(server, with_tls=True).name_resolves()
    is_problem(finding, found, "correct `server`")


def test_a_proxy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("federation.example.org:8443", with_tls=True)
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "")
    finding = connection.no_proxy_is_between()
    assert finding.verdict is Verdict.WARNING
    assert "proxy.example.org:3128" in finding.found
    assert finding.mend.endswith("export NO_PROXY=federation.example.org")
    monkeypatch.setenv("no_proxy", "federation.example.org")
    assert connection.no_proxy_is_between().verdict is Verdict.OK


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = f"127.0.0.1:{listening.getsockname()[1]}"
    finding = Connection(server, with_tls=True).port_is_open()
    is_problem(finding, f"nothing listens at {server}", "start the server there")


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
    is_problem(finding, "127.0.0.1:1", mend)


def test_no_tls_to_a_tls_server(files: tuple[Path, Path]) -> None:
    with answering(Script(), files) as server:
        finding = Connection(server, with_tls=False).tls_is_agreed()
    is_problem(finding, f"{server} speaks TLS", "remove `insecure: true`")


def test_tls_to_a_server_without() -> None:
    with answering(Script(), None) as server:
        finding = Connection(server, with_tls=True).tls_is_agreed()
    is_problem(finding, "speaks HTTP without TLS", "started with `tls`")


def test_no_tls_on_both_sides_is_worth_a_warning() -> None:
    with answering(Script(), None) as server:
        finding = Connection(server, with_tls=False).tls_is_agreed()
    assert finding.verdict is Verdict.WARNING


@pytest.mark.parametrize("with_tls", [True, False])
def test_software_that_speaks_neither(with_tls: bool) -> None:
    with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as server:
        finding = Connection(server, with_tls=with_tls).tls_is_agreed()
    is_problem(finding, "other software has the port", "correct `server`")


@pytest.mark.parametrize(
    ("script", "verdict", "found"),
    [
        (
            Script({}, {"/health": (200, ""), "/v1/control/list-nodes": (405, "")}),
            Verdict.PROBLEM,
            "is Flower's own port",
        ),
        (Script({}, {}), Verdict.PROBLEM, "/health gives HTTP status 404"),
        (Script({}), Verdict.WARNING, "is no gateway of knnper's"),
        (
            Script(answers={"/health": (503, "")}),
            Verdict.PROBLEM,
            "Flower behind it does not (HTTP status 503)",
        ),
    ],
)
def test_who_is_behind_the_port(script: Script, verdict: Verdict, found: str) -> None:
    with answering(script, None) as server:
        finding = Connection(server, with_tls=False).gateway_answers()
    assert finding.verdict is verdict
    assert found in finding.found
    assert "correct `server`" in finding.mend or "superlink.log" in finding.mend


@pytest.mark.parametrize(
    ("server_ahead_s", "verdict", "found"),
    [
        (0, Verdict.OK, "within"),
        (-3.5, Verdict.WARNING, "3.5 s ahead of"),
        (-30, Verdict.PROBLEM, "30.0 s ahead of"),
        (200, Verdict.WARNING, "200.0 s behind"),
        (400, Verdict.PROBLEM, "400.0 s behind"),
    ],
)
def test_clocks(server_ahead_s: float, verdict: Verdict, found: str) -> None:
    with answering(Script(ahead_s=server_ahead_s), None) as server:
        finding = Connection(server, with_tls=False).clocks_agree()
    assert finding.verdict is verdict
    # The server tells whole seconds.
    if verdict is Verdict.OK:
        assert found in finding.found
    else:
        seconds, direction = found.split(" s ")
        told = finding.found.split(" clock is ")[1].split(" s ")
        assert abs(float(told[0]) - float(seconds)) <= 0.75
        assert told[1].startswith(direction)
        assert "NTP" in finding.mend


def test_another_version() -> None:
    headers = {GATEWAY_HEADERS["knnper"]: "0.1.0", GATEWAY_HEADERS["flwr"]: "1.30.0"}
    with answering(Script(headers), None) as server:
        finding = Connection(server, with_tls=False).versions_agree()
    is_problem(finding, "flwr 1.30.0 on the server", "the same versions")
