"""Tries the images and the compose file: a whole federation, from training to serving.

Run it with the repository's environment, where Docker and Compose are:
``.venv/bin/python docker/try.py``. It makes a federation in a temporary folder, builds
the images, trains three clients, asks their services, stops everything and starts it
anew, lets a fourth client join, and compares each figure with a serial simulation of
the same experiment. Nothing is left but the images.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trial import (
    SEEN,
    UNSEEN,
    Answers,
    Engine,
    Federation,
    TrialError,
    asked,
    require_engine,
    require_figures,
    require_rows,
)

PORTS = {"0000": 8100, "0001": 8101, UNSEEN: 8102, "0003": 8103}
RUN = "state/runs/trial"
STAY_S = 300
INTERRUPTED = 130


@dataclass
class Trial:
    """One federation in containers."""

    engine: Engine
    federation: Federation
    _began: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        """Say what has happened, and after how many seconds."""
        sys.stdout.write(f"{time.monotonic() - self._began:6.1f} s  {text}\n")
        sys.stdout.flush()

    def story(self) -> None:
        """Train, personalise, stop, start, serve; then a fourth client joins."""
        self.engine.up()
        self.tell("server, three clients and their services are healthy")
        self._require_closed()
        self.engine.run(
            "server", "knnper", "fed", "submit", "experiment.yaml", "--stay", "0"
        )
        self._require_rows(SEEN)
        before = {name: self._predictions(name) for name in SEEN}
        self.tell("three clients were trained and serve; figures are the simulation's")
        self.engine.down()
        self.engine.up()
        after = {name: self._predictions(name) for name in SEEN}
        if after != before:
            raise TrialError("after a restart the services answer something else")
        self.tell("all ended in order; new containers give the same answers")
        self._onboard()

    def _onboard(self) -> None:
        self.federation.add(UNSEEN)
        self.engine.give_keys()
        resume = (
            "knnper",
            "fed",
            "submit",
            "--resume",
            RUN,
            "--stay",
            str(STAY_S),
            "--detach",
        )
        self.engine.run("server", *resume)
        self.engine.up(f"service-{UNSEEN}")
        self._predictions(UNSEEN)
        self._require_rows((*SEEN, UNSEEN))
        self.tell("a fourth client joined and serves; figures are the simulation's")

    def _require_closed(self) -> None:
        """Clients reach the gateway's fleet paths and nothing else."""
        for port, path, expected in (
            (8443, "/health", "200"),
            (8443, "/v1/control/list-runs", "403 404"),
            (8000, "/health", "refused"),
        ):
            found = self.engine.reached("client-0000", "server", port, path)
            if found not in expected.split():
                raise TrialError(
                    f"a client that asks server:{port}{path} gets {found}, expected "
                    f"{expected}"
                )
        self.tell("a client reaches the gateway's fleet paths, not Flower's own port")

    def _require_rows(self, names: tuple[str, ...]) -> None:
        run = self.federation.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        self.engine.copy(f"server:/knnper/{RUN}", run)
        require_rows(run, self.federation.reference, names)

    def _predictions(self, name: str) -> Answers:
        token = self.engine.run(f"service-{name}", "cat", "state/token")
        images, labels = self.federation.test_split(name)
        answers, info = asked(f"http://127.0.0.1:{PORTS[name]}", token, images)
        row = self.federation.expected(name)
        require_figures(name, answers, labels, info, row)
        return answers


def main() -> int:
    """Return the exit status: 0 after the whole story."""
    arguments = _arguments()
    # So that what was started is stopped after SIGTERM, too.
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
    federation = Federation(folder)
    federation.make()
    engine = Engine(federation.place)
    trial = Trial(engine, federation)
    with engine.cleaned_up():
        if build:
            engine.build()
            trial.tell("built the images")
        for image, megabytes in engine.sizes().items():
            trial.tell(f"image {image}: {megabytes} MB")
        engine.give_keys()
        trial.story()
    trial.tell("stopped and removed everything: the story is complete")


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
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--work", type=Path, help="keep all files in this new folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
