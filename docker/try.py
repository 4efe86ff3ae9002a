"""Tries the images and the compose file: a whole federation, from training to serving.

Run it with the repository's environment, where Docker and Compose are:
``.venv/bin/python docker/try.py``. It makes a federation in a temporary folder, builds
the images, trains three clients, asks their services, stops everything and starts it
again, adds a fourth client, and compares each figure with a serial simulation of the
same experiment. Only the images remain.
"""

import argparse
import contextlib
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from numpy.typing import NDArray

COMPOSE_FILE = Path(__file__).with_name("compose.yaml")
PROJECT = "knnper-trial"
HEALTHY_S, READY_S = 300, 60.0
UID = "10001"  # of the images' user
IMAGES = {
    "server": os.environ.get("KNNPER_SERVER_IMAGE", "knnper-server"),
    "client": os.environ.get("KNNPER_CLIENT_IMAGE", "knnper-client"),
}
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
CLOSE = 1e-5  # ten times what other threads make of a probability
PORTS = {"0000": 8100, "0001": 8101, UNSEEN: 8102, "0003": 8103}
RUN = "state/runs/trial"
_SUBMIT = ("knnper", "fed", "submit", "server.yaml", "--stay")
INTERRUPTED = 130
# Run inside a container: HOST PORT PATH.
_ASK = """
import http.client, ssl, sys
host, port, path = sys.argv[1:]
context = ssl.create_default_context(cafile="ca.crt")
connection = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
try:
    connection.request("GET", path)
    print(connection.getresponse().status)
except ConnectionRefusedError:
    print("refused")
"""


Answers = Sequence[Mapping[str, Any]]


class TrialError(Exception):
    """A figure or a status differs from what the message names as expected."""


def require_engine() -> None:
    """Raise an error where no container can be run."""
    if shutil.which("docker") is None:
        raise TrialError("cannot run: there is no `docker` here; install Docker Engine")
    for words, hint in (
        (("version",), "Docker does not answer; is its daemon running, and may you "),
        (("compose", "version"), "Compose is missing; install docker-compose-plugin "),
    ):
        done = subprocess.run(["docker", *words], capture_output=True, text=True)
        if done.returncode:
            raise TrialError(f"cannot run: {hint}use it?\n{done.stderr.strip()}")


@dataclass(frozen=True)
class ContainerEngine:
    """The containers of one federation; Docker and Compose as a person types them."""

    federation: Path

    def build(self) -> None:
        """Build the images."""
        for target, image in IMAGES.items():
            file, root = COMPOSE_FILE.with_name("Dockerfile"), COMPOSE_FILE.parents[1]
            words = ("--file", file, "--target", target, "--tag", image, root)
            # Without BuildKit, an old engine does not know a step's secrets.
            environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
            subprocess.run(["docker", "build", *words], check=True, env=environment)

    def sizes(self) -> dict[str, int]:
        """Return the images' sizes in megabytes."""
        words = ("docker", "image", "inspect", "--format", "{{.Size}}")
        return {
            image: int(_output(*words, image)) // 10**6 for image in IMAGES.values()
        }

    def give_keys(self) -> None:
        """Make the private keys those of the user that the containers run as."""
        keys = [
            f"/federation/{file.relative_to(self.federation)}"
            for pattern in ("server/*.key", "clients/*/*.key")
            for file in self.federation.glob(pattern)
        ]
        root = ("docker", "run", "--rm", "--user", "0", "--network", "none")
        mount = ("--volume", f"{self.federation}:/federation")
        chown = ("--entrypoint", "chown", IMAGES["server"], f"{UID}:{UID}")
        _output(*root, *mount, *chown, *keys)

    def up(self, *services: str) -> None:
        """Start containers; return when all of them are healthy."""
        wait = ("--wait", "--wait-timeout", str(HEALTHY_S))
        self._compose("up", "--detach", "--no-build", *wait, *services)

    def down(self) -> None:
        """Stop and remove the containers; volumes stay."""
        self._compose("stop")
        ended = self._compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}")
        unruly = [line for line in ended.splitlines() if not line.endswith(" 0")]
        if unruly:
            raise TrialError(f"exit status after SIGTERM, expected 0: {unruly}")
        self._compose("down")

    def run(self, service: str, *words: str) -> str:
        """Run a command in a container, and return what it prints."""
        return self._compose("exec", "-T", service, *words).strip()

    def reached(self, service: str, host: str, port: int, path: str) -> str:
        """Return the HTTP status that a container gets, or ``refused``."""
        return self.run(service, "python", "-c", _ASK, host, str(port), path)

    def copy(self, source: str, target: Path) -> None:
        """Copy a folder out of a container."""
        self._compose("cp", source, str(target))

    @contextlib.contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """Remove everything but the images in the end; after a failure show logs."""
        every = ("--profile", "*")
        try:
            yield
        except BaseException:
            logs = self._compose(
                *every, "logs", "--no-color", "--tail", "40", check=False
            )
            sys.stderr.write(logs)
            raise
        finally:
            # A second Ctrl-C does not leave containers behind.
            words = ("down", "--volumes", "--timeout", "10")
            self._compose(*every, *words, check=False)

    def _compose(self, *words: str, check: bool = True) -> str:
        compose = ("docker", "compose", "--project-name", PROJECT)
        command = (*compose, "--file", str(COMPOSE_FILE), *words)
        environment = {**os.environ, "KNNPER_FEDERATION": str(self.federation)}
        return _output(*command, environment=environment, check=check)


def _output(
    *command: str, environment: dict[str, str] | None = None, check: bool = True
) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        shown = " ".join(command[:8])
        raise TrialError(f"{shown} ... failed\n{done.stdout}{done.stderr}")
    return done.stdout


class TrialFederation:
    """A folder with the files of a small federation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "federation"  # what `knnper fed init` makes
        self.reference = folder / "reference"  # the same experiment, simulated
        self._shares = folder / "shares"  # each client's data

    def make(self) -> None:
        """Simulate, split the data, and found the federation with the seen clients."""
        central = self.folder / "experiment.yaml"
        central.write_text(yaml.safe_dump(EXPERIMENT))
        serial = ("--set", "run.engine=serial", "--output", self.reference)
        _knnper("simulate", central, *serial)
        _knnper("partition", central, "--export", self._shares)
        clients = [word for name in SEEN for word in ("--client", name)]
        _knnper("fed", "init", self.place, "--host", SERVER, *clients)
        (self.place / "server" / "state").mkdir()
        agreed = json.loads((self._shares / "labels.json").read_text())["data"]
        over_sites = {**EXPERIMENT, "data": agreed, "partition": {"name": "sites"}}
        experiment = self.place / "server" / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(over_sites))
        for name in SEEN:
            self._give_share(name)

    def add(self, name: str) -> None:
        """Add another client with its share of the data."""
        _knnper("fed", "add-client", self.place, name)
        self._give_share(name)

    def expected(self, name: str) -> dict[str, str]:
        """Return a client's row of figures in the reference."""
        with (self.reference / "clients.csv").open(encoding="utf-8") as file:
            return next(row for row in csv.DictReader(file) if row["client"] == name)

    def test_split(self, name: str) -> tuple[NDArray[Any], list[int]]:
        """Return a client's n test images (n, height, width, channels) and labels."""
        with np.load(self._shares / f"{name}.npz") as arrays:
            return arrays["test_inputs"], arrays["test_labels"].tolist()

    def _give_share(self, name: str) -> None:
        client = self.place / "clients" / name
        (client / "state").mkdir()
        shutil.copy(self._shares / f"{name}.npz", client / "data.npz")
        file = client / "client.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["data"] = {"name": "npz", "path": "data.npz"}
        file.write_text(yaml.safe_dump(settings))


def _knnper(*words: str | Path) -> None:
    knnper = Path(sys.executable).with_name("knnper")
    subprocess.run([knnper, *words], check=True, capture_output=True, text=True)


def ask(
    address: str, token: str, images: NDArray[Any]
) -> tuple[Answers, dict[str, Any]]:
    """Return a service's predictions for n images, and its description."""
    file, deadline = io.BytesIO(), time.monotonic() + READY_S
    np.save(file, images)
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
        while not (answer := http.get("/ready")).is_success:
            if time.monotonic() > deadline:
                raise TrialError(f"{address} is not ready: {answer.text}")
            time.sleep(0.2)
        kind = {"content-type": "application/x-npy"}
        answer = http.post("/predict", content=file.getvalue(), headers=kind)
        answers = answer.raise_for_status().json()["predictions"]
        return answers, http.get("/info").raise_for_status().json()


def require_figures(
    name: str,
    answers: Answers,
    labels: Sequence[int],
    info: Mapping[str, Any],
    row: Mapping[str, str],
) -> None:
    """Compare a service's predictions with the client's row of the simulation."""
    by_model, served = (
        np.array([list(answer[kind].values()) for answer in answers])
        for kind in ("global_probabilities", "probabilities")
    )
    pairs = list(zip(answers, labels, strict=True))
    losses = [-math.log(answer["probabilities"][str(label)]) for answer, label in pairs]
    undecided = np.mean(_are_close(by_model) | _are_close(served)).item()
    for key, value, tolerance in (
        (
            "accuracy",
            np.mean([answer["label"] == label for answer, label in pairs]),
            undecided,
        ),
        ("accuracy_global", np.mean(np.argmax(by_model, 1) == labels), undecided),
        ("log_loss", np.mean(losses), CLOSE * float(row["log_loss"])),
        ("knn_weight", info["knn_weight"], 0.0),
        ("num_stored", info["store"]["num_stored"], 0.0),
    ):
        expected = float(row[key])
        if abs(value - expected) > tolerance:
            raise TrialError(
                f"the service of {name}: {key} is {value}, the simulation's {expected}"
            )


def _are_close(probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the two largest of a row, shape (n, c), can change places."""
    ordered = np.sort(probabilities, axis=1)
    close: NDArray[np.bool_] = ordered[:, -1] - ordered[:, -2] < CLOSE
    return close


def require_rows(run: Path, reference: Path, names: Sequence[str]) -> None:
    """Compare a run's weights and its clients' rows with the simulation's."""
    weights, expected = _weights(run), _weights(reference)
    if weights != expected:
        raise TrialError(f"the weights are {weights}, the simulation's {expected}")
    rows, all_rows = _rows(run), _rows(reference)
    simulated = {name: all_rows[name] for name in ("client", *names)}
    if rows != simulated:
        shown = "\n".join([*rows.values(), "the simulation's:", *simulated.values()])
        raise TrialError(f"clients.csv of {run.name} differs:\n{shown}")


def _weights(run: Path) -> str:
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return str(results["training"]["state_sha256"])


def _rows(run: Path) -> dict[str, str]:
    lines = (run / "clients.csv").read_text(encoding="utf-8").splitlines()
    return {line.partition(",")[0]: line for line in lines}


@dataclass
class Trial:
    """One federation in containers."""

    engine: ContainerEngine
    federation: TrialFederation
    _began: float = field(default_factory=time.monotonic)

    def report(self, text: str) -> None:
        """Print a step and the seconds so far."""
        sys.stdout.write(f"{time.monotonic() - self._began:6.1f} s  {text}\n")
        sys.stdout.flush()

    def story(self) -> None:
        """Train, personalise, stop, start, serve; then add a fourth client."""
        self.engine.up()
        self.report("server, three clients and their services are healthy")
        self._require_closed()
        self.engine.run("server", *_SUBMIT, "0", "experiment.yaml")
        self._require_rows(SEEN)
        before = {name: self._predictions(name) for name in SEEN}
        self.report(
            "three clients were trained and serve; figures are the simulation's"
        )
        self.engine.down()
        self.engine.up()
        after = {name: self._predictions(name) for name in SEEN}
        if after != before:
            raise TrialError("after a restart the services give other answers")
        self.report("all ended in order; new containers give the same answers")
        self._onboard()

    def _onboard(self) -> None:
        self.federation.add(UNSEEN)
        self.engine.give_keys()
        self.engine.run("server", *_SUBMIT, "300", "--resume", RUN, "--detach")
        self.engine.up(f"service-{UNSEEN}")
        self._predictions(UNSEEN)
        self._require_rows((*SEEN, UNSEEN))
        self.report("a fourth client joined and serves; figures are the simulation's")

    def _require_closed(self) -> None:
        """Clients reach the gateway's fleet paths and nothing else."""
        for port, path, expected in (
            (8443, "/health", "200"),
            (8443, "/v1/control/list-runs", "403 404"),
            (8000, "/health", "refused"),
        ):
            status = self.engine.reached("client-0000", "server", port, path)
            if status not in expected.split():
                raise TrialError(
                    f"a client that asks server:{port}{path} gets {status}, expected "
                    f"{expected}"
                )
        self.report("a client reaches the gateway's fleet paths, not Flower's own port")

    def _require_rows(self, names: tuple[str, ...]) -> None:
        run = self.federation.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        self.engine.copy(f"server:/knnper/{RUN}", run)
        require_rows(run, self.federation.reference, names)

    def _predictions(self, name: str) -> Answers:
        token = self.engine.run(f"service-{name}", "cat", "state/token")
        images, labels = self.federation.test_split(name)
        answers, info = ask(f"http://127.0.0.1:{PORTS[name]}", token, images)
        row = self.federation.expected(name)
        require_figures(name, answers, labels, info, row)
        return answers


def main() -> int:
    """Run the trial; return the exit status."""
    arguments = _arguments()
    # SIGTERM, too, stops all containers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        require_engine()
        with _work_folder(arguments.work) as folder:
            _run(folder, build=not arguments.no_build)
    except (TrialError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"FAILED: {error}\n{getattr(error, 'stderr', '') or ''}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; everything was stopped and removed\n")
        return INTERRUPTED
    return 0


def _run(folder: Path, *, build: bool) -> None:
    federation = TrialFederation(folder)
    federation.make()
    engine = ContainerEngine(federation.place)
    trial = Trial(engine, federation)
    with engine.cleaned_up():
        if build:
            engine.build()
            trial.report("built the images")
        for image, megabytes in engine.sizes().items():
            trial.report(f"image {image}: {megabytes} MB")
        engine.give_keys()
        trial.story()
    trial.report("stopped and removed everything: the story is complete")


@contextlib.contextmanager
def _work_folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True)
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="knnper-trial-") as name:
        yield Path(name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-build", action="store_true", help="the images exist")
    parser.add_argument("--work", type=Path, help="keep all files in this new folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
