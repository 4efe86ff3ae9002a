"""The files of a small federation, and what it is compared with."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

SEEN = ("0000", "0001", "0003")
UNSEEN = "0002"
SERVER = "server"  # the name under which Compose's network knows it
EXPERIMENT: dict[str, Any] = {
    "name": "trial",
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
_KNNPER = Path(sys.executable).with_name("knnper")


@dataclass(frozen=True)
class Federation:
    """A folder with all files."""

    folder: Path

    @property
    def place(self) -> Path:
        """What ``knnper fed init`` makes."""
        return self.folder / "federation"

    @property
    def shares(self) -> Path:
        """Each client's data."""
        return self.folder / "shares"

    @property
    def reference(self) -> Path:
        """The run of the same experiment in one process, without Flower."""
        return self.folder / "reference"

    def make(self) -> None:
        """Simulate, split the data, and found the federation with the seen clients."""
        central = self.folder / "experiment.yaml"
        central.write_text(yaml.safe_dump(EXPERIMENT))
        serial = ("--set", "run.engine=serial", "--output", self.reference)
        _knnper("simulate", central, *serial)
        _knnper("partition", central, "--export", self.shares)
        clients = [word for name in SEEN for word in ("--client", name)]
        _knnper("fed", "init", self.place, "--host", SERVER, *clients)
        (self.place / "server" / "state").mkdir()
        agreed = json.loads((self.shares / "labels.json").read_text())["data"]
        over_sites = {**EXPERIMENT, "data": agreed, "partition": {"name": "sites"}}
        experiment = self.place / "server" / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(over_sites))
        for name in SEEN:
            self._give_share(name)

    def add(self, name: str) -> None:
        """Let another client in, whose data is there."""
        _knnper("fed", "add-client", self.place, name)
        self._give_share(name)

    def expected(self, name: str) -> dict[str, str]:
        """Return a client's row of figures in the reference."""
        with (self.reference / "clients.csv").open(encoding="utf-8") as file:
            return next(row for row in csv.DictReader(file) if row["client"] == name)

    def test_split(self, name: str) -> tuple[NDArray[Any], list[int]]:
        """Return a client's n test images (n, height, width, channels) and labels."""
        with np.load(self.shares / f"{name}.npz") as arrays:
            return arrays["test_inputs"], arrays["test_labels"].tolist()

    def _give_share(self, name: str) -> None:
        client = self.place / "clients" / name
        (client / "state").mkdir()
        shutil.copy(self.shares / f"{name}.npz", client / "data.npz")
        file = client / "client.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["data"] = {"name": "npz", "path": "data.npz"}
        file.write_text(yaml.safe_dump(settings))


def make_federation(folder: Path) -> Federation:
    """Return a new federation in an empty folder."""
    federation = Federation(folder)
    federation.make()
    return federation


def _knnper(*words: str | Path) -> None:
    subprocess.run([_KNNPER, *words], check=True, capture_output=True, text=True)
