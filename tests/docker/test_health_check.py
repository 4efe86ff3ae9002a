"""The images' health check, asked on this machine."""

import runpy
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.integration

HEALTH = runpy.run_path(str(Path(__file__).parents[2] / "docker" / "health.py"))
check: Callable[[str, str], int] = HEALTH["main"]


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a server that answers /health."""
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def settings(folder: Path, **values: object) -> str:
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def test_program_that_answers_is_healthy(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("server", settings(tmp_path, listen=f"0.0.0.0:{port}")) == 0
    assert check("service", settings(tmp_path, service={"port": port})) == 0
    assert check("service", settings(tmp_path, service={"port": 1})) == 1
    assert "refused" in capsys.readouterr().err


def test_a_node_is_well_once_it_has_joined(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = settings(tmp_path, server=f"127.0.0.1:{port}")
    assert check("node", file) == 1
    assert "not in the federation yet" in capsys.readouterr().err
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "node.json").touch()
    assert check("node", file) == 0
