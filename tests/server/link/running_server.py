"""A whole server in a folder of its own: SuperLink, gateway and registration."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.server.link.registration import census
from knnper.server.link.setup import FederationFolder, add_client, found
from knnper.server.settings import ServerSettings, read_server
from knnper.transport.credentials import Address
from tests.processes import (
    BIN,
    BIN_IN_PATH,
    KNNPER,
    LOCALHOST,
    Commands,
    Running,
    free_port,
    free_ports,
)


@dataclass(frozen=True)
class RunningServer:
    """A server that clients can reach."""

    folder: FederationFolder
    settings: ServerSettings
    commands: Commands
    process: Running

    @property
    def gateway(self) -> Address:
        return Address(LOCALHOST, self.settings.listen_address.port)

    @property
    def said(self) -> str:
        return self.process.written

    @property
    def statuses(self) -> dict[str, str]:
        return {one.name: one.status for one in census(self.settings)[0]}

    def add(self, name: str) -> Path:
        """Return the folder of a new client."""
        return add_client(self.folder, name, self.gateway)

    def flwr(self, home: Path, *arguments: str | Path) -> str:
        """Return what Flower's command says, whether it succeeds or not."""
        command = [BIN / "flwr", *arguments]
        done = self.commands.start("flwr", command, {"FLWR_HOME": str(home)})
        done.wait(60)
        return done.written

    @contextlib.contextmanager
    def supernode(self, client: Path, key: Path | None) -> Iterator[Running]:
        """Start Flower's own SuperNode."""
        trust = ("--root-certificates", client / "ca.crt")
        command = [
            *(BIN / "flower-supernode", "--superlink", str(self.gateway)),
            *("--isolation", "process", "--port", str(free_port())),
            *(("--insecure",) if self.settings.insecure else trust),
            *(() if key is None else ("--auth-supernode-private-key", key)),
        ]
        home = {"FLWR_HOME": str(client / "flwr")}
        process = self.commands.start("supernode", command, home)
        try:
            yield process
        finally:
            process.kill()

    @contextlib.contextmanager
    def growth(self) -> Iterator[list[float]]:
        """Give, at the end, by how many megabytes its processes grew at most."""
        before, most, done = self._megabytes(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                most[0] = max(most[0], self._megabytes() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield most
        finally:
            done.set()
            thread.join()

    def _megabytes(self) -> float:
        """Return what its processes hold, shared pages counted once."""
        total = 0
        for process in self.commands.processes():
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                lines = (line.split() for line in rollup.splitlines())
                total += sum(int(line[1]) for line in lines if line[0] == "Pss:")
        return total * 1024 / 1e6

    def again(self) -> Running:
        """Start the server, which has ended, once more."""
        return _start(self.commands, self.folder)


@contextlib.contextmanager
def running_server(
    folder: Path, clients: Sequence[str] = (), insecure: bool = False
) -> Iterator[RunningServer]:
    """Found a federation in ``folder`` and run its server until the end."""
    federation = FederationFolder(folder)
    port, control_port = free_ports(2)
    found(federation, [LOCALHOST], port, control_port, insecure)
    for name in clients:
        add_client(federation, name, Address(LOCALHOST, port))
    environment = {"PATH": BIN_IN_PATH, "COLUMNS": "500"}
    with Commands(folder / "logs", environment) as commands:
        process = _start(commands, federation)
        settings = read_server(federation.server_file)
        try:
            yield RunningServer(federation, settings, commands, process)
        finally:
            process.stop()


def _start(commands: Commands, folder: FederationFolder) -> Running:
    """Return a server that is ready."""
    server = commands.start("server", [KNNPER, "fed", "server", folder.server_file])
    server.wait_for("is ready", 60)
    return server
