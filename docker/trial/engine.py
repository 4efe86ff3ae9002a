"""Docker and Compose, as a person would type them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPOSE_FILE = Path(__file__).parents[1] / "compose.yaml"
PROJECT = "knnper-trial"
HEALTHY_S = 300
UID = "10001"  # of the images' user
IMAGES = {
    "server": os.environ.get("KNNPER_SERVER_IMAGE", "knnper-server"),
    "client": os.environ.get("KNNPER_CLIENT_IMAGE", "knnper-client"),
}
_ASK = Path(__file__).with_name("ask.py").read_text("utf-8")


class TrialError(Exception):
    """Something is not as it should be; the message says what was expected."""


def require_engine() -> None:
    """Refuse to begin where no container can be run."""
    if shutil.which("docker") is None:
        raise TrialError("cannot run: there is no `docker` here; install Docker Engine")
    for words, what in (
        (("version",), "Docker does not answer; is its daemon running, and may you "),
        (("compose", "version"), "Compose is missing; install docker-compose-plugin "),
    ):
        found = subprocess.run(["docker", *words], capture_output=True, text=True)
        if found.returncode:
            raise TrialError(f"cannot run: {what}use it?\n{found.stderr.strip()}")


@dataclass(frozen=True)
class Engine:
    """The containers of one federation."""

    federation: Path

    def build(self) -> None:
        """Build the images."""
        for target, image in IMAGES.items():
            root = COMPOSE_FILE.parents[1]
            file = COMPOSE_FILE.with_name("Dockerfile")
            words = ("--file", file, "--target", target, "--tag", image, root)
            # Without BuildKit, an old engine does not know a step's secrets.
            environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
            subprocess.run(["docker", "build", *words], check=True, env=environment)

    def sizes(self) -> dict[str, int]:
        """Return the images' sizes in megabytes."""
        words = ("docker", "image", "inspect", "--format", "{{.Size}}")
        return {
            image: int(_output(*words, image)) // 1_000_000 for image in IMAGES.values()
        }

    def give_keys(self) -> None:
        """Make the private keys those of the user that the containers run as."""
        keys = [
            f"/federation/{file.relative_to(self.federation)}"
            for pattern in ("server/*.key", "clients/*/*.key")
            for file in self.federation.glob(pattern)
        ]
        owner = f"{UID}:{UID}"
        mount = f"{self.federation}:/federation"
        root = ("docker", "run", "--rm", "--user", "0", "--network", "none")
        chown = ("--volume", mount, "--entrypoint", "chown", IMAGES["server"], owner)
        _output(*root, *chown, *keys)

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

    def knnper(self, service: str, *words: str) -> str:
        """Run a ``knnper`` command in a container."""
        return self._compose("exec", "-T", service, "knnper", *words)

    def read(self, service: str, file: str) -> str:
        """Return the text of a file in a container."""
        return self._compose("exec", "-T", service, "cat", file).strip()

    def reached(self, service: str, host: str, port: int, path: str) -> str:
        """Return the HTTP status that a container gets, or ``refused``."""
        words = ("python", "-c", _ASK, host, str(port), path)
        return self._compose("exec", "-T", service, *words).strip()

    def copy(self, source: str, target: Path) -> None:
        """Copy a folder out of a container."""
        self._compose("cp", source, str(target))

    @contextlib.contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """Remove everything but the images in the end; after a failure show logs."""
        try:
            yield
        except BaseException:
            logs = ("logs", "--no-color", "--tail", "40")
            self._compose("--profile", "*", *logs, check=False, shown=True)
            raise
        finally:
            # A second Ctrl-C does not leave containers behind.
            words = ("down", "--volumes", "--timeout", "10")
            self._compose("--profile", "*", *words, check=False)

    def _compose(self, *words: str, check: bool = True, shown: bool = False) -> str:
        compose = ("docker", "compose", "--project-name", PROJECT)
        command = (*compose, "--file", str(COMPOSE_FILE), *words)
        environment = {**os.environ, "KNNPER_FEDERATION": str(self.federation)}
        if shown:
            subprocess.run(command, check=check, env=environment)
            return ""
        return _output(*command, environment=environment, check=check)


def _output(
    *command: str, environment: dict[str, str] | None = None, check: bool = True
) -> str:
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if check and found.returncode:
        shown = " ".join(command[:8])
        raise TrialError(f"{shown} ... failed\n{found.stdout}{found.stderr}")
    return found.stdout
