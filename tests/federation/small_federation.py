"""A federation of real processes on this machine, and what it is compared with."""

import contextlib
import csv
import functools
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from typer.testing import CliRunner

from knnper.cli.app import app
from tests.federation.site_tricks import APP, Tricks
from tests.processes import KNNPER, LOCALHOST, Commands, Running, free_ports, wait_until

SEEN = ("0000", "0001", "0003")
UNSEEN = "0002"
EXPERIMENT: dict[str, Any] = {
    "name": "digits",
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 4,
        "alpha": 0.5,
        "unseen_fraction": 0.25,
    },
    "model": {"name": "tiny_cnn", "embedding_dim": 64},
    "training": {"num_rounds": 3, "batch_size": 16, "learning_rate": 0.05},
    "method": {"name": "knn_per"},
    "run": {"seed": 0},
}


@dataclass(frozen=True)
class Example:
    """An experiment, each client's share of its data, and its run in serial."""

    folder: Path
    document: Mapping[str, Any] = field(default_factory=lambda: EXPERIMENT)

    @property
    def file(self) -> Path:
        """The experiment."""
        return self.folder / "digits.yaml"

    @property
    def shares(self) -> Path:
        """Folder with ``NAME.npz`` for each client."""
        return self.folder / "shares"

    @functools.cached_property
    def reference(self) -> Path:
        """The run's folder under the engine ``serial``."""
        return self.simulated("reference")

    def simulated(self, name: str, *changes: str) -> Path:
        """Return the folder of a run under the engine ``serial``."""
        run = self.folder / name
        sets = [
            part for one in ("run.engine=serial", *changes) for part in ("--set", one)
        ]
        _command("simulate", self.file, *sets, "--output", run)
        return run

    def make(self) -> None:
        self.file.write_text(yaml.safe_dump(dict(self.document)))
        _command("partition", self.file, "--export", self.shares)


def _command(*words: str | Path) -> None:
    """Do what ``knnper`` does with these words, in this process."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output


@dataclass(frozen=True)
class Run:
    """The folder of a run, as it is now."""

    folder: Path

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return found

    @property
    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [
            json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line
        ]

    @property
    def weights(self) -> str:
        """Fingerprint of the trained state."""
        fingerprint: str = self.results["training"]["state_sha256"]
        return fingerprint

    @property
    def clients(self) -> dict[str, dict[str, str]]:
        """Each client's row of ``clients.csv``."""
        with (self.folder / "clients.csv").open() as file:
            return {row["client"]: row for row in csv.DictReader(file)}

    @property
    def lines(self) -> dict[str, str]:
        """The same rows, letter by letter."""
        lines = (self.folder / "clients.csv").read_text().splitlines()
        return {line.split(",", 1)[0]: line for line in lines}

    def require_same(self, reference: Path, clients: Sequence[str]) -> None:
        """The same weights as another run's, and the same figures letter by letter."""
        other = Run(reference)
        assert self.weights == other.weights
        lines = other.lines
        assert self.lines == {name: lines[name] for name in ("client", *clients)}

    def wait_for_rounds(self, count: int) -> None:
        wait_until(lambda: len(self.rounds) >= count, f"{count} rounds")


@dataclass
class Federation:
    """A folder that ``knnper fed init`` made, and the commands that use it."""

    folder: Path
    example: Example
    commands: Commands
    port: int
    control_port: int
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def server_file(self) -> Path:
        return self.folder / "server" / "server.yaml"

    @property
    def run_log(self) -> str:
        """What the runs have written so far: what ``flwr log`` shows."""
        database = self.server_file.parent / "state/superlink.db"
        with contextlib.closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT log FROM task_logs").fetchall()
        return "".join(text for (text,) in rows)

    def client_folder(self, name: str) -> Path:
        return self.folder / "clients" / name

    def client_file(self, name: str) -> Path:
        return self.client_folder(name) / "client.yaml"

    def start(self, machine: str, name: str, *words: str | Path) -> Running:
        """Start a ``knnper`` command on a machine."""
        inside = self.inside.get(machine, ())
        places = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
        tricks = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        return self.commands.start(name, [*inside, KNNPER, *words], tricks)

    def server(self) -> Running:
        """Start the server; return when clients can connect."""
        server = self.start("server", "server", "fed", "server", self.server_file)
        server.wait_for("is ready: clients connect to")
        return server

    def client(self, name: str, *words: str) -> Running:
        """Start a node; it may not be in the federation yet."""
        words = (str(self.client_file(name)), *words)
        return self.start(name, f"client-{name}", "fed", "client", *words)

    def clients(self, *names: str) -> dict[str, Running]:
        """Start nodes that do tricks when asked; return when all are in."""
        started = {name: self.client(name, "--app", APP) for name in names or SEEN}
        for node in started.values():
            node.wait_for("in the federation of")
        return started

    def tricks(self, name: str) -> Tricks:
        """Return what a client that `clients` starts can be asked for."""
        return Tricks(self.client_folder(name))

    def num_train(self, name: str) -> int:
        """Return on how many examples a client trains."""
        with np.load(self.client_folder(name) / "data.npz") as share:
            return len(share["train_labels"])

    def submit(self, *words: str, stay: float = 0) -> tuple[Running, Run]:
        """Submit the experiment; changes are ``KEY=VALUE``."""
        changes = [part for word in words for part in ("--set", word)]
        run = Run(self.folder / "run")
        return self._submit(
            self.example.file, "--output", run.folder, *changes, stay=stay
        ), run

    def resume(self, run: Run, *, stay: float = 0) -> Running:
        return self._submit("--resume", run.folder, stay=stay)

    def _submit(self, *words: str | Path, stay: float) -> Running:
        words = (self.server_file, *words, "--stay", str(stay))
        return self.start("server", "submit", "fed", "submit", *words)

    def add_client(self, name: str, /, **settings: object) -> None:
        """Add a client that is not known yet, with its share of the data."""
        words = ("add-client", self.folder, name, "--host", LOCALHOST)
        self.commands.run(f"add-{name}", KNNPER, "fed", *words)
        self.give_share(name, **settings)

    def give_share(self, name: str, /, **settings: object) -> None:
        """Give a client its share of the data; change its settings."""
        share = self.client_folder(name) / "data.npz"
        shutil.copy(self.example.shares / f"{name}.npz", share)
        given = {"data": {"name": "npz", "path": "data.npz"}, "service": {"port": 0}}
        self.configure(name, **{**given, **settings})

    def configure(self, name: str, /, **settings: object) -> None:
        """Change a client's file."""
        file = self.client_file(name)
        found = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**found, **settings}))


def found_federation(
    folder: Path,
    example: Example,
    commands: Commands,
    *words: str,
    host: str = LOCALHOST,
    clients: Sequence[str] = SEEN,
    inside: Mapping[str, Sequence[str]] | None = None,
) -> Federation:
    """Make a federation whose clients have their shares; nothing runs yet."""
    port, control_port = free_ports(2)
    names = [word for name in clients for word in ("--client", name)]
    ports = ["--port", str(port), "--control-port", str(control_port)]
    place = ["init", str(folder), "--host", host, *ports, *names, *words]
    _command("fed", *place)
    federation = Federation(folder, example, commands, port, control_port, inside or {})
    for name in clients:
        federation.give_share(name)
    return federation


Found = Callable[..., Federation]
