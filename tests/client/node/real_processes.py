"""A SuperLink and clients as processes of their own, on this machine."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_node_key,
)

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
FAR_TOO_LONG_S = 60.0
PROJECT = """
[project]
name = "trial"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "trial_server:app"
clientapp = "trial_client:app"
[tool.flwr.app.config]
output = ""
experiment = ""
"""


@dataclass(frozen=True)
class Link:
    """A SuperLink with TLS that takes only registered keys."""

    address: str
    ca: Path
    home: Path

    def register(self, key: Path, name: str) -> None:
        public = f"{key}.pub"
        done = self._flwr("supernode", "register", public, "link", "--name", name)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, app: Path, config: str = "", **modules: str) -> Any:
        """Run modules as an app; return what its server half wrote to ``output``."""
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        for name, code in modules.items():
            (app / f"{name}.py").write_text(code)
        config = f'output="{app / "output.json"}" {config}'
        done = self._flwr("run", str(app), "link", "--stream", "--run-config", config)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((app / "output.json").read_text())

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "flwr", *arguments],
            env=environment(self.home),
            capture_output=True,
            text=True,
            check=False,
        )


@contextlib.contextmanager
def link_running(folder: Path) -> Iterator[Link]:
    authority, ca = new_authority("a CA"), folder / "ca.crt"
    certificate, key = folder / "server.crt", folder / "server.key"
    authority.write(ca, folder / "ca.key")
    issue_server_certificate(authority, ["127.0.0.1"]).write(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = folder / "operator"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.link]\naddress = "127.0.0.1:{port}"\n'
        f"root-certificates = {json.dumps(str(ca))}\n"
    )
    command: list[str | Path] = [BIN / "flower-superlink", "--port", str(port)]
    command += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate]
    command += ["--ssl-keyfile", key, "--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    with (folder / "link.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment(home), stdout=log, stderr=log
        )
        try:
            _wait_for_port(port, process)
            yield Link(f"127.0.0.1:{port}", ca, home)
        finally:
            process.terminate()
            process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + FAR_TOO_LONG_S
    while time.monotonic() < end:
        assert process.poll() is None, "the SuperLink ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise TimeoutError("no SuperLink")


class ClientProcess:
    """``knnper fed client``, and what it has written so far."""

    def __init__(self, config: Path, *arguments: str) -> None:
        command: list[str | Path] = [BIN / "knnper", "fed", "client", config]
        self.process = subprocess.Popen(
            [*command, "--app", "misbehaving_app:app", *arguments],
            env=environment(config.parent / "unused"),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.written = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, words: str) -> str:
        """Return the line that contains ``words``."""
        end = time.monotonic() + FAR_TOO_LONG_S
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=0.1)
                if words in line:
                    return line
            if self.process.poll() is not None and self.lines.empty():
                raise AssertionError(f"ended without {words!r}: {self.written}")
        raise TimeoutError(f"{words!r} is not in {self.written}")

    def wait_until_in(self) -> None:
        self.wait_for("in the federation of")

    def wait(self) -> int:
        status = self.process.wait(FAR_TOO_LONG_S)
        self._reader.join()
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.written += line
                self.lines.put(line)


@contextlib.contextmanager
def client(config: Path, *arguments: str) -> Iterator[ClientProcess]:
    process = ClientProcess(config, *arguments)
    try:
        yield process
    finally:
        process.process.terminate()  # so that the server counts it out at once
        process.wait()


def new_client(folder: Path, link: Link, key: Path | None = None) -> Path:
    """Return the file of a client whose key nobody knows yet, or of ``key``."""
    folder.mkdir()
    if key is None:
        key = folder / "client.key"
        write_node_key(key, new_node_key())
    path = folder / "client.yaml"
    path.write_text(
        f"name: {folder.name}\nserver: {link.address}\n"
        f"tls: {{ca: {link.ca}}}\nkey: {key}\n"
        "data: {name: image_folder, path: data}\n"
    )
    return path


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": str(HERE),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def runner_of(process: int) -> int:
    """Return the process id of a client's runner."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text()
    (runner,) = map(int, children.split())
    return runner
