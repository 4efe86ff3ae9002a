"""Tries the images and the compose file: a whole federation, from training to serving.

Run it with the repository's environment, where Docker and Compose are:
``.venv/bin/python docker/try.py``. It makes a federation in a temporary folder, builds
the images, trains three clients, requests predictions from their services, replaces all
containers, adds a fourth client, and compares each figure with a serial simulation of
the same experiment. Only the images remain.
"""

import argparse
import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from numpy.typing import NDArray

COMPOSE_FILE = Path(__file__).with_name("compose.yaml")
SERVER_IMAGE = os.environ.get("KNNPER_SERVER_IMAGE", "knnper-server")
USER = "10001:10001"  # of the images
HEALTHY_S, READY_S = 300, 60.0
SERVER = "server"  # its name in Compose's network
SEEN = ("0000", "0001", "0003")
UNSEEN = "0002"
PORTS = {"0000": 8100, "0001": 8101, UNSEEN: 8102, "0003": 8103}
RUN = "state/runs/trial"
SUBMIT = ("knnper", "fed", "submit", "server.yaml", "--stay")
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
# Ten times the difference that another number of threads makes to a probability.
TOLERANCE = 1e-5
# Run inside a container, with HOST PORT PATH and the allowed outcomes; fails on others.
CHECK_ANSWER = """
import http.client, ssl, sys
host, port, path, *expected = sys.argv[1:]
context = ssl.create_default_context(cafile="ca.crt")
connection = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
try:
    connection.request("GET", path)
    found = str(connection.getresponse().status)
except ConnectionRefusedError:
    found = "refused"
if found not in expected:
    sys.exit(f"{host}:{port}{path}: found {found}, expected {' or '.join(expected)}")
"""

Predictions = Sequence[Mapping[str, Any]]


class TrialError(Exception):
    """A command failed, or a figure differs from the simulation's."""


def output(
    *command: str | Path, environment: dict[str, str] | None = None, check: bool = True
) -> str:
    """Run a command; return its standard output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        shown = " ".join(map(str, command[:8]))
        raise TrialError(f"{shown} ... failed\n{done.stdout}{done.stderr}")
    return done.stdout


def knnper(*words: str | Path) -> None:
    """Run a command of the repository's environment."""
    output(Path(sys.executable).with_name("knnper"), *words)


class TrialFederation:
    """The files of a small federation in a folder, and the simulation to compare with.

    ``root`` is the folder that ``knnper fed init`` makes.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "federation"
        self._folder = folder
        self._shares = folder / "shares"
        self._simulated = folder / "simulated"

    def make(self) -> None:
        """Simulate, partition the data, and found the federation with seen clients."""
        central = self._folder / "experiment.yaml"
        central.write_text(yaml.safe_dump(EXPERIMENT))
        serial = ("--set", "run.engine=serial", "--output", self._simulated)
        knnper("simulate", central, *serial)
        knnper("partition", central, "--export", self._shares)
        clients = [word for name in SEEN for word in ("--client", name)]
        knnper("fed", "init", self.root, "--host", SERVER, *clients)
        (self.root / "server" / "state").mkdir()
        data = json.loads((self._shares / "labels.json").read_text())["data"]
        over_sites = {**EXPERIMENT, "data": data, "partition": {"name": "sites"}}
        experiment = self.root / "server" / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(over_sites))
        for name in SEEN:
            self._give_data(name)

    def add(self, name: str) -> None:
        """Add another client with its share of the data."""
        knnper("fed", "add-client", self.root, name)
        self._give_data(name)

    def _give_data(self, name: str) -> None:
        client = self.root / "clients" / name
        (client / "state").mkdir()
        shutil.copy(self._shares / f"{name}.npz", client / "data.npz")
        file = client / "client.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["data"] = {"name": "npz", "path": "data.npz"}
        file.write_text(yaml.safe_dump(settings))

    def give_keys(self) -> None:
        """Make the private keys readable by the user that the containers run as."""
        keys = [
            Path("/federation") / file.relative_to(self.root)
            for pattern in ("server/*.key", "clients/*/*.key")
            for file in self.root.glob(pattern)
        ]
        root = ("docker", "run", "--rm", "--user", "0", "--network", "none")
        mount = ("--volume", f"{self.root}:/federation", "--entrypoint", "chown")
        output(*root, *mount, SERVER_IMAGE, USER, *keys)

    def require_run(self, run: Path, names: Sequence[str]) -> None:
        """Compare a run's weights and clients' rows with the simulation's."""
        hashes = [
            json.loads((folder / "results.json").read_text())["training"][
                "state_sha256"
            ]
            for folder in (run, self._simulated)
        ]
        if hashes[0] != hashes[1]:
            raise TrialError(f"weights are {hashes[0]}, the simulation's {hashes[1]}")
        rows, simulated = (
            (folder / "clients.csv").read_text().splitlines()
            for folder in (run, self._simulated)
        )
        expected = [row for row in simulated if row.split(",")[0] in ("client", *names)]
        if sorted(rows) != sorted(expected):
            shown = "\n".join([*rows, "the simulation's:", *expected])
            raise TrialError(f"clients.csv of {run.name} differs:\n{shown}")

    def require_predictions(
        self, name: str, predictions: Predictions, info: Mapping[str, Any]
    ) -> None:
        """Compare a service's answers with the client's row of the simulation."""
        with (self._simulated / "clients.csv").open(encoding="utf-8") as file:
            row = next(row for row in csv.DictReader(file) if row["client"] == name)
        labels = self.test_split(name)[1]
        by_model, served = (
            np.array([list(prediction[kind].values()) for prediction in predictions])
            for kind in ("global_probabilities", "probabilities")
        )
        pairs = list(zip(predictions, labels, strict=True))
        losses = [
            -math.log(prediction["probabilities"][str(label)])
            for prediction, label in pairs
        ]
        right = [prediction["label"] == label for prediction, label in pairs]
        undecided = np.mean(has_near_tie(by_model) | has_near_tie(served)).item()
        for key, value, tolerance in (
            ("accuracy", np.mean(right), undecided),
            ("accuracy_global", np.mean(np.argmax(by_model, 1) == labels), undecided),
            ("log_loss", np.mean(losses), TOLERANCE * float(row["log_loss"])),
            ("knn_weight", info["knn_weight"], 0.0),
            ("num_stored", info["store"]["num_stored"], 0.0),
        ):
            expected = float(row[key])
            if abs(value - expected) > tolerance:
                raise TrialError(
                    f"service of {name}: {key} is {value}, the simulation's {expected}"
                )

    def test_split(self, name: str) -> tuple[NDArray[Any], list[int]]:
        """Return a client's n test images (n, height, width, channels) and labels."""
        with np.load(self._shares / f"{name}.npz") as arrays:
            return arrays["test_inputs"], arrays["test_labels"].tolist()


def has_near_tie(probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the two largest of a row, shape (n, c), are almost equal."""
    ordered = np.sort(probabilities, axis=1)
    close: NDArray[np.bool_] = ordered[:, -1] - ordered[:, -2] < TOLERANCE
    return close


class Trial:
    """One federation in containers."""

    def __init__(self, folder: Path) -> None:
        self.federation = TrialFederation(folder)
        self._folder = folder
        self._began = time.monotonic()

    def report(self, text: str) -> None:
        """Print a step and the seconds so far."""
        sys.stdout.write(f"{time.monotonic() - self._began:6.1f} s  {text}\n")
        sys.stdout.flush()

    def compose(self, *words: str, check: bool = True) -> str:
        """Run ``docker compose`` on the federation."""
        project = ("--project-name", "knnper-trial", "--profile", "*")
        command = ("docker", "compose", *project, "--file", str(COMPOSE_FILE), *words)
        environment = {
            **os.environ,
            "KNNPER_FEDERATION": str(self.federation.root),
            "DOCKER_BUILDKIT": "1",  # the classic builder knows no secrets
        }
        return output(*command, environment=environment, check=check)

    def start(self, *services: str) -> None:
        """Start containers; return when all of them are healthy."""
        wait = ("--wait", "--wait-timeout", str(HEALTHY_S))
        self.compose("up", "--detach", "--no-build", *wait, *services)

    def execute(self, service: str, *words: str) -> str:
        """Run a command in a container."""
        return self.compose("exec", "-T", service, *words).strip()

    def run(self, *, build: bool) -> None:
        """Go through all steps; remove the containers at the end."""
        self.federation.make()
        if build:
            self.compose("build", SERVER, f"client-{SEEN[0]}")
            self.report("built the images")
        self.federation.give_keys()
        try:
            self._train_and_serve()
            self._onboard()
        except BaseException:
            logs = self.compose("logs", "--no-color", "--tail", "40", check=False)
            sys.stderr.write(logs)
            raise
        finally:
            self.compose("down", "--volumes", "--timeout", "10", check=False)
        self.report("stopped and removed everything: the story is complete")

    def _train_and_serve(self) -> None:
        seen = [f"{kind}-{name}" for kind in ("client", "service") for name in SEEN]
        self.start(SERVER, *seen)
        self.report("server, three clients and their services are healthy")
        self._require_closed_ports()
        self.execute(SERVER, *SUBMIT, "0", "experiment.yaml")
        self._require_run(SEEN)
        before = {name: self._predictions(name) for name in SEEN}
        self.report("trained three clients; their figures are the simulation's")
        self.compose("stop")
        ended = self.compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}")
        failed = [line for line in ended.splitlines() if not line.endswith(" 0")]
        if failed:
            raise TrialError(f"exit status after SIGTERM, expected 0: {failed}")
        self.compose("down")
        self.start(SERVER, *seen)
        if {name: self._predictions(name) for name in SEEN} != before:
            raise TrialError("after a restart the services give other answers")
        self.report("new containers give the same answers")

    def _onboard(self) -> None:
        self.federation.add(UNSEEN)
        self.federation.give_keys()
        self.execute(SERVER, *SUBMIT, "300", "--resume", RUN, "--detach")
        self.start(f"service-{UNSEEN}")
        self._predictions(UNSEEN)
        self._require_run((*SEEN, UNSEEN))
        self.report("a fourth client joined; its figures are the simulation's")

    def _require_closed_ports(self) -> None:
        """Check that clients reach the gateway's fleet paths and nothing else."""
        client = f"client-{SEEN[0]}"
        for check in (
            ("8443", "/health", "200"),
            ("8443", "/v1/control/list-runs", "403", "404"),
            ("8000", "/health", "refused"),
        ):
            self.execute(client, "python", "-c", CHECK_ANSWER, SERVER, *check)
        self.report("a client reaches the gateway's fleet paths, not Flower's own port")

    def _require_run(self, names: Sequence[str]) -> None:
        run = self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        self.compose("cp", f"{SERVER}:/knnper/{RUN}", str(run))
        self.federation.require_run(run, names)

    def _predictions(self, name: str) -> Predictions:
        """Return a service's predictions for its client's test images, compared."""
        token = self.execute(f"service-{name}", "cat", "state/token")
        headers = {"Authorization": f"Bearer {token}"}
        images = io.BytesIO()
        np.save(images, self.federation.test_split(name)[0])
        address = f"http://127.0.0.1:{PORTS[name]}"
        deadline = time.monotonic() + READY_S
        with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
            while not (answer := http.get("/ready")).is_success:
                if time.monotonic() > deadline:
                    raise TrialError(f"{address} is not ready: {answer.text}")
                time.sleep(0.2)
            kind = {"content-type": "application/x-npy"}
            answer = http.post("/predict", content=images.getvalue(), headers=kind)
            predictions: Predictions = answer.raise_for_status().json()["predictions"]
            info = http.get("/info").raise_for_status().json()
        self.federation.require_predictions(name, predictions, info)
        return predictions


def main() -> int:
    """Run the trial; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-build", action="store_true", help="the images exist")
    arguments = parser.parse_args()
    if shutil.which("docker") is None:
        sys.stderr.write("cannot run: there is no `docker`; install Docker Engine\n")
        return 1
    # SIGTERM removes the containers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="knnper-trial-") as folder:
            Trial(Path(folder)).run(build=not arguments.no_build)
    except TrialError as error:
        sys.stderr.write(f"FAILED: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
