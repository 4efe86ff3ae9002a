"""A whole server in a folder of its own, and runs of small messages on it."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.server.link.registration import list_clients
from knnper.server.link.setup import FederationFolder, add_client, create_federation
from knnper.server.link.submission import status
from knnper.server.link.superlink import CONNECTION
from knnper.server.settings import ServerSettings, read_server
from knnper.transport.credentials import Address
from tests import processes


@dataclass(frozen=True)
class RunningServer:
    """A server that clients can reach."""

    folder: FederationFolder
    settings: ServerSettings
    commands: processes.Commands
    process: processes.Running

    @property
    def gateway(self) -> Address:
        return Address(processes.LOCALHOST, self.settings.listen_address.port)

    @property
    def printed(self) -> str:
        return self.process.written

    @property
    def statuses(self) -> dict[str, str]:
        return {client.name: client.status for client in list_clients(self.settings)[0]}

    def add(self, name: str) -> Path:
        """Return the folder of a new client."""
        return add_client(self.folder, name, self.gateway)

    def flwr(self, home: Path, *arguments: str | Path) -> str:
        """Return the output of Flower's command, also if it fails."""
        command = [processes.BIN / "flwr", *arguments]
        done = self.commands.start("flwr", command, {"FLWR_HOME": str(home)})
        done.wait(60)
        return done.written

    @contextlib.contextmanager
    def supernode(self, client: Path, key: Path | None) -> Iterator[processes.Running]:
        """Start Flower's own SuperNode."""
        trust = ("--root-certificates", client / "ca.crt")
        command = [
            *(processes.BIN / "flower-supernode", "--superlink", str(self.gateway)),
            *("--isolation", "process", "--port", str(processes.free_port())),
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
        """Return the memory of its processes in MB; shared pages count once."""
        total = 0
        for process in self.commands.processes():
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                lines = (line.split() for line in rollup.splitlines())
                total += sum(int(line[1]) for line in lines if line[0] == "Pss:")
        return total * 1024 / 1e6

    def again(self) -> processes.Running:
        """Start the server, which has ended, once more."""
        return _start(self.commands, self.folder)


@contextlib.contextmanager
def running_server(
    folder: Path, clients: Sequence[str] = (), insecure: bool = False
) -> Iterator[RunningServer]:
    """Found a federation in ``folder`` and run its server until the end."""
    federation = FederationFolder(folder)
    port, control_port = processes.free_ports(2)
    create_federation(federation, [processes.LOCALHOST], port, control_port, insecure)
    for name in clients:
        add_client(federation, name, Address(processes.LOCALHOST, port))
    environment = {"PATH": processes.BIN_IN_PATH, "COLUMNS": "500"}
    with processes.Commands(folder / "logs", environment) as commands:
        process = _start(commands, federation)
        settings = read_server(federation.server_file)
        try:
            yield RunningServer(federation, settings, commands, process)
        finally:
            process.stop()


def _start(commands: processes.Commands, folder: FederationFolder) -> processes.Running:
    """Return a server that is ready."""
    server = commands.start(
        "server", [processes.KNNPER, "fed", "server", folder.server_file]
    )
    server.wait_for("is ready", 60)
    return server


_PROJECT = """\
[project]
name = "messages"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "messages:server_app"
clientapp = "messages:server_app"
[tool.flwr.app.config]
nodes = ""
rounds = 1
seconds = 60
size = 10
output = ""
"""

_CODE = """
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

server_app = ServerApp()

@server_app.main()
def main(grid, context):
    config = context.run_config
    nodes = [int(node) for node in config["nodes"].split()]
    with open(config["output"], "a") as output:
        for number in range(config["rounds"]):
            payload = np.full(config["size"], number, np.float32)
            content = RecordDict({"payload": ArrayRecord({"x": Array(payload)})})
            sent = {}
            for node in nodes:
                message = Message(content=content, dst_node_id=node,
                                  message_type="train", group_id=str(number))
                sent[list(grid.push_messages([message]))[0]] = node
            end = time.monotonic() + config["seconds"]
            missing = set(sent)
            while missing and time.monotonic() < end:
                for reply in grid.pull_messages(list(missing)):
                    metadata = reply.metadata
                    missing.discard(metadata.reply_to_message_id)
                    line = {
                        "round": number,
                        "to": sent.get(metadata.reply_to_message_id),
                        "from": metadata.src_node_id,
                        "error": reply.error.reason if reply.has_error() else None,
                    }
                    print(json.dumps(line), file=output, flush=True)
                time.sleep(0.1)
"""


@dataclass(frozen=True)
class MessageRun:
    """The run, as its operator sees it."""

    run_id: int
    output: Path
    server: RunningServer

    @property
    def replies(self) -> list[dict[str, Any]]:
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def state(self) -> str:
        run_status = status(self.server.settings, self.run_id)
        return f"{run_status.state} {run_status.outcome}".strip()

    def finished(self, patience_s: float = 90.0) -> str:
        processes.wait_until(
            lambda: self.state.startswith("finished"), timeout_s=patience_s
        )
        return self.state


def submitted(
    server: RunningServer, folder: Path, nodes: Sequence[int], **config: int
) -> MessageRun:
    """Submit a run with messages for ``nodes``; ``folder`` is made."""
    code = folder / "messages"
    code.mkdir(parents=True)
    output = folder / "replies.jsonl"
    (code / "__init__.py").write_text(_CODE)
    (folder / "pyproject.toml").write_text(_PROJECT)
    given = {"nodes": " ".join(map(str, nodes)), "output": str(output)}
    words = [f'{key}="{value}"' for key, value in given.items()]
    words += [f"{key}={value}" for key, value in config.items()]
    command = ("run", folder, CONNECTION, "--format", "json")
    home = server.settings.flower_home
    printed = server.flwr(home, *command, "--run-config", " ".join(words))
    document = json.loads(printed[printed.index("{") :])
    assert "run-id" in document, printed
    return MessageRun(int(document["run-id"]), output, server)
