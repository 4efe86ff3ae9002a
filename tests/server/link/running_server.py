"""A whole server in a folder of its own: SuperLink, gateway and registration."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.server.link.registration import census
from knnper.server.link.setup import FederationFolder, add_client, found
from knnper.server.settings import ServerSettings, read_server
from knnper.transport.credentials import Address
from tests.server.link.gateway_stage import HOST, free_port

COMMANDS = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "COLUMNS": "500",
}


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


@dataclass(frozen=True)
class RunningServer:
    """A server that clients can reach."""

    folder: FederationFolder
    settings: ServerSettings
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def gateway(self) -> Address:
        return Address(HOST, self.settings.listen_address.port)

    @property
    def said(self) -> str:
        return self.log_file.read_text()

    @property
    def statuses(self) -> dict[str, str]:
        return {one.name: one.status for one in census(self.settings)[0]}

    def add(self, name: str) -> Path:
        """Return the folder of a new client."""
        return add_client(self.folder, name, self.gateway)

    def flwr(self, home: Path, *arguments: str | Path) -> str:
        """Return what Flower's command says, whether it succeeds or not."""
        command = [COMMANDS / "flwr", *arguments]
        environment = {**ENVIRONMENT, "FLWR_HOME": str(home)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def supernode(
        self, client: Path, key: Path | None
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start Flower's own SuperNode; give the process and its log."""
        trust = ("--root-certificates", client / "ca.crt")
        options = [
            *("--superlink", str(self.gateway), "--isolation", "process"),
            *("--port", str(free_port())),
            *(("--insecure",) if self.settings.insecure else trust),
            *(() if key is None else ("--auth-supernode-private-key", key)),
        ]
        log = client / "supernode.log"
        environment = {**ENVIRONMENT, "FLWR_HOME": str(client / "flwr")}
        command: Sequence[str | Path] = [COMMANDS / "flower-supernode", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment
            )
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_server(
    folder: Path, clients: Sequence[str] = (), insecure: bool = False
) -> Iterator[RunningServer]:
    """Found a federation in ``folder`` and run its server until the end."""
    federation = FederationFolder(folder)
    port = free_port()
    found(federation, [HOST], port, free_port(), insecure)
    for name in clients:
        add_client(federation, name, Address(HOST, port))
    log = folder / "server.log"
    process = start_server(federation.server_file, log)
    try:
        yield RunningServer(
            federation, read_server(federation.server_file), process, log
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def start_server(server_file: Path, log: Path) -> subprocess.Popen[bytes]:
    """Return the process of a server that is ready."""
    with log.open("wb") as file:
        command = [str(COMMANDS / "knnper"), "fed", "server", str(server_file)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT)
    wait_until(lambda: "is ready" in log.read_text() or process.poll() is not None, 60)
    assert process.poll() is None, log.read_text()
    return process
