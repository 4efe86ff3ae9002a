"""A federation of real processes on this machine, with TLS and client keys."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from knnper.server.link.setup import FederationFolder
from knnper.server.link.superlink import CONNECTION, write_connection
from knnper.transport.credentials import Address

_COMMANDS = Path(sys.executable).parent
_REPOSITORY = Path(__file__).parents[1]
_START_S = 60.0
_PROJECT = """\
[project]
name = "real-rounds"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "app:server_app"
clientapp = "app:client_app"
[tool.flwr.app.config]
clients = 0
rounds = 0
model = ""
output = ""
"""

_CODE = """\
from {apps} import client_app, server_app
__all__ = ["client_app", "server_app"]
"""

Command = Sequence[str | Path]


@dataclass(frozen=True)
class RealFederation:
    """Certificates, keys and ports of a server and its clients."""

    folder: FederationFolder  # made by ``knnper fed init``
    names: tuple[str, ...]  # of the clients
    gateway: int  # port of our gateway, unused by stock Flower
    control: int

    @property
    def home(self) -> Path:
        """``FLWR_HOME`` of the operator."""
        return self.folder.server / "state" / "flwr"


@dataclass
class ProcessGroup:
    """Processes that end with the ``with`` block."""

    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Command, **environment: str) -> None:
        """Start a process with its output in the log."""
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    env=_environment(**environment),
                    stdout=log,
                    stderr=log,
                )
            )

    def end(self) -> None:
        """End all, clients before the server."""
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def new_federation(num_clients: int) -> Iterator[RealFederation]:
    """Yield a federation that is not started."""
    names = tuple(f"site-{number}" for number in range(num_clients))
    with tempfile.TemporaryDirectory() as place:
        folder = FederationFolder(Path(place) / "federation")
        ports = free_ports(2)
        command: list[str | Path] = [_COMMANDS / "knnper", "fed", "init"]
        command += [folder.path, "--host", "127.0.0.1", "--port", str(ports[0])]
        command += ["--control-port", str(ports[1])]
        for name in names:
            command += ["--client", name]
        _finish(command)
        yield RealFederation(folder, names, *ports)


@contextlib.contextmanager
def serving(federation: RealFederation) -> Iterator[ProcessGroup]:
    """Start ``knnper fed server``."""
    with _running(federation) as running:
        server_file = federation.folder.server_file
        running.start([_COMMANDS / "knnper", "fed", "server", server_file])
        _wait_until(lambda: "is ready" in running.log.read_text(), "the server")
        yield running


@contextlib.contextmanager
def ours(federation: RealFederation) -> Iterator[Callable[[str, int], list[float]]]:
    """Start ``knnper fed server`` and ``knnper fed client``; yield a round maker."""
    with serving(federation) as running:
        for name in federation.names:
            config = federation.folder.client(name) / "client.yaml"
            command: list[str | Path] = [_COMMANDS / "knnper", "fed", "client", config]
            command += ["--app", "benchmarks.real_apps_ours:client_app"]
            running.start(command)
        yield functools.partial(_round_seconds, federation, "benchmarks.real_apps_ours")


@contextlib.contextmanager
def stock(federation: RealFederation) -> Iterator[Callable[[str, int], list[float]]]:
    """Start Flower's own SuperLink and SuperNodes; yield a round maker."""
    server = federation.folder.server
    ca = server / "ca.crt"
    address = f"127.0.0.1:{federation.control}"
    with _running(federation) as running:
        write_connection(federation.home, Address("127.0.0.1", federation.control), ca)
        command: list[str | Path] = [_COMMANDS / "flower-superlink"]
        command += ["--port", str(federation.control), "--ssl-ca-certfile", ca]
        command += ["--ssl-certfile", server / "server.crt"]
        command += ["--ssl-keyfile", server / "server.key", "--enable-supernode-auth"]
        command += ["--disable-runtime-dependency-installation"]
        running.start(command, FLWR_HOME=str(federation.home))
        _wait_for_port(federation.control)
        for name, port in zip(
            federation.names, free_ports(len(federation.names)), strict=True
        ):
            place = federation.folder.client(name)
            key = place / f"{name}.key"
            _flwr(federation, "supernode", "register", f"{key}.pub", CONNECTION)
            command = [_COMMANDS / "flower-supernode", "--superlink", address]
            command += ["--root-certificates", ca, "--port", str(port)]
            command += ["--auth-supernode-private-key", key]
            running.start(command, FLWR_HOME=str(place / "flwr"))
        yield functools.partial(
            _round_seconds, federation, "benchmarks.real_apps_stock"
        )


@contextlib.contextmanager
def _running(federation: RealFederation) -> Iterator[ProcessGroup]:
    running = ProcessGroup(federation.folder.path / "log")
    try:
        yield running
    finally:
        running.end()


def _round_seconds(
    federation: RealFederation, apps: str, model: str, num_rounds: int
) -> list[float]:
    """Submit a run of the apps in the module ``apps``; return seconds per round."""
    with tempfile.TemporaryDirectory() as place:
        folder, output = Path(place) / "app", Path(place) / "seconds.json"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(_PROJECT)
        (folder / "app.py").write_text(_CODE.format(apps=apps))
        config = (
            f'clients={len(federation.names)} rounds={num_rounds} model="{model}" '
            f'output="{output}"'
        )
        _flwr(federation, "run", folder, CONNECTION, "--stream", "--run-config", config)
        if not output.exists():
            log = (federation.folder.path / "log").read_text()
            raise RuntimeError(f"the run failed: {log[-5000:]}")
        seconds: list[float] = json.loads(output.read_text())
        return seconds


def _flwr(federation: RealFederation, *arguments: str | Path) -> None:
    _finish([_COMMANDS / "flwr", *arguments], FLWR_HOME=str(federation.home))


def _finish(command: Command, **environment: str) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        env=_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")


def _environment(**variables: str) -> dict[str, str]:
    """Return the environment of all processes, with the commands on its path."""
    return {
        **os.environ,
        "PATH": f"{_COMMANDS}:{os.environ['PATH']}",
        "PYTHONPATH": str(_REPOSITORY),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        **variables,
    }


def free_ports(count: int) -> list[int]:
    """Return unused ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [listening.getsockname()[1] for listening in sockets]


def _wait_for_port(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    _wait_until(listens, f"port {port}")


def _wait_until(is_ready: Callable[[], bool], subject: str) -> None:
    end = time.monotonic() + _START_S
    while not is_ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{subject} is not ready after {_START_S:g} s")
        time.sleep(0.1)
