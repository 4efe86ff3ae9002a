"""A SuperLink and clients as processes of their own, on this machine."""

import contextlib
import json
import socket
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
from tests.processes import (
    BIN,
    BIN_IN_PATH,
    KNNPER,
    LOCALHOST,
    Commands,
    Running,
    free_port,
    wait_until,
)

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
    commands: Commands

    def register(self, key: Path, name: str) -> None:
        words = ("supernode", "register", f"{key}.pub", "link", "--name", name)
        self.commands.run("register", BIN / "flwr", *words)

    def run(self, app: Path, config: str = "", **modules: str) -> Any:
        """Run modules as an app; return what its server half wrote to ``output``."""
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        for name, code in modules.items():
            (app / f"{name}.py").write_text(code)
        config = f'output="{app / "output.json"}" {config}'
        words = ("run", app, "link", "--stream", "--run-config", config)
        self.commands.run("run", BIN / "flwr", *words)
        return json.loads((app / "output.json").read_text())

    @contextlib.contextmanager
    def client(self, config: Path, *arguments: str) -> Iterator[Running]:
        command: list[str | Path] = [KNNPER, "fed", "client", config]
        command += ["--app", "misbehaving_app:app", *arguments]
        process = self.commands.start("client", command)
        try:
            yield process
        finally:
            process.stop()  # so that the server counts it out at once


@contextlib.contextmanager
def link_running(folder: Path) -> Iterator[Link]:
    authority, ca = new_authority("a CA"), folder / "ca.crt"
    certificate, key = folder / "server.crt", folder / "server.key"
    authority.write(ca, folder / "ca.key")
    issue_server_certificate(authority, [LOCALHOST]).write(certificate, key)
    port, home = free_port(), folder / "operator"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.link]\naddress = "{LOCALHOST}:{port}"\n'
        f"root-certificates = {json.dumps(str(ca))}\n"
    )
    command: list[str | Path] = [BIN / "flower-superlink", "--port", str(port)]
    command += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate]
    command += ["--ssl-keyfile", key, "--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    modules = str(Path(__file__).parent)
    environment = {"FLWR_HOME": str(home), "PATH": BIN_IN_PATH, "PYTHONPATH": modules}
    with Commands(folder / "logs", environment) as commands:
        process = commands.start("link", command)

        def is_reached() -> bool:
            assert not process.ended, process.written
            with contextlib.suppress(OSError):
                socket.create_connection((LOCALHOST, port)).close()
                return True
            return False

        wait_until(is_reached, "a SuperLink", 60)
        yield Link(f"{LOCALHOST}:{port}", ca, commands)


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
