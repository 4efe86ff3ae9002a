"""A snapshot of a federation: its server, clients and runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from knnper.cli.terminal import print_table, say, tell
from knnper.cli.watching import failures_in
from knnper.errors import KnnPerError, RunError
from knnper.server.link import doctor
from knnper.server.link.registration import ONLY_FOLDER, ClientStatus, list_clients
from knnper.server.run_folder import RunFolder, is_run
from knnper.server.settings import ServerSettings
from knnper.simulation.catalogue import experiment_catalogue
from knnper.transport.waiting import duration

RunState = Literal["finished", "running", "staying", "stopped", "unreadable"]
_FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "train_loss": "loss",
        "validation_accuracy": "accuracy",
        "validation_accuracy_personal": "personal",
    }
)
"""Figures of a round by their keys in rounds.jsonl, with the table's headings."""


@dataclass(frozen=True)
class RunSnapshot:
    """One run."""

    name: str
    folder: Path
    state: RunState
    changed: float | None = None  # when it last wrote something, in seconds since 1970
    num_rounds: int | None = None
    last_round: dict[str, Any] | None = None  # as in rounds.jsonl
    problem: str = ""

    @property
    def num_rounds_done(self) -> int:
        """Return the number of the last round; 0 before it."""
        return 0 if self.last_round is None else int(self.last_round["server_round"])

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        done = {"num_rounds_done": self.num_rounds_done}
        return {**asdict(self), "folder": str(self.folder), **done}


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment."""

    settings: ServerSettings
    is_running: bool
    clients: list[ClientStatus]
    runs: list[RunSnapshot]
    problems: list[str]

    def as_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.settings.name,
            "server": {
                "is_running": self.is_running,
                "listen": self.settings.listen,
                "control": self.settings.control,
            },
            "clients": list(map(asdict, self.clients)),
            "runs": [run.as_document() for run in self.runs],
            "problems": self.problems,
        }


def take_snapshot(settings: ServerSettings, run: Path | None = None) -> Snapshot:
    """Return the current state of a federation, with all of its runs or one."""
    clients, problems = list_clients(settings)
    is_running = doctor.is_running(settings.state)
    if not is_running:  # the snapshot itself shows it
        problems = [text for text in problems if not text.startswith(ONLY_FOLDER)]
    folders = _runs(settings) if run is None else [run_folder(settings, run)]
    runs = sorted(map(_snapshot, folders), key=lambda snapshot: snapshot.changed or 0.0)
    return Snapshot(settings, is_running, clients, runs, problems)


def run_folder(settings: ServerSettings, run: Path | None) -> RunFolder:
    """Return a run by its folder or name; by default the only run under way."""
    if run is not None:
        places = (run, settings.runs_folder / run)
        return RunFolder.open(next(filter(is_run, places), run))
    led = [folder for folder in _runs(settings) if folder.is_led()]
    # A run with results only distributes its model to late clients.
    under_way = [folder for folder in led if not folder.is_finished()] or led
    if len(under_way) == 1:
        return under_way[0]
    names = ", ".join(folder.path.name for folder in under_way) or "none"
    raise RunError(
        f"expected one run under way in {settings.runs_folder}, found {names}; give "
        "the folder of a run"
    )


def _runs(settings: ServerSettings) -> list[RunFolder]:
    folder = settings.runs_folder
    places = folder.iterdir() if folder.is_dir() else ()
    return [RunFolder(place) for place in places if is_run(place)]


def _snapshot(folder: RunFolder) -> RunSnapshot:
    name, path = folder.path.name, folder.path
    try:
        rounds = folder.rounds()
        num_rounds = folder.experiment(experiment_catalogue()).training.num_rounds
    except (KnnPerError, OSError) as error:
        return RunSnapshot(name, path, "unreadable", problem=str(error))
    state: RunState = "finished" if folder.is_finished() else "stopped"
    last = rounds[-1] if rounds else None
    if folder.is_led():
        num_done = 0 if last is None else int(last["server_round"])
        # After --from-round, old results may still exist.
        is_done = folder.is_finished() and num_done >= num_rounds
        state = "staying" if is_done else "running"
    written = [path / file for file in ("rounds.jsonl", "results.json")]
    times = [file.stat().st_mtime for file in written if file.exists()]
    changed = max(times, default=path.stat().st_mtime)
    return RunSnapshot(name, path, state, changed, num_rounds, last)


def show(snapshot: Snapshot) -> None:
    """Print a snapshot."""
    settings = snapshot.settings
    state = "running" if snapshot.is_running else "not running"
    tell(f"server {settings.name}: {state} (clients connect to {settings.listen})")
    print_table(
        ("client", "status"),
        [(client.name, client.status) for client in snapshot.clients],
    )
    if snapshot.runs:
        figures = _FIGURES.values()
        header = ("run", "state", "round", "clients", *figures, "last change")
        print_table(header, [_row(run) for run in snapshot.runs])
    else:
        tell(f"no runs in {settings.runs_folder}")
    for run in snapshot.runs:
        for line in failures_in(run.last_round or {}):
            tell(f"{run.name}: {line}")
        if run.problem:
            say(f"{run.name}: {run.problem}")
    for problem in snapshot.problems:
        say(problem)


def _row(run: RunSnapshot) -> tuple[str, ...]:
    last = run.last_round or {}
    clients = ""
    if last:
        failed = f", {last['num_failed']} failed" if last["num_failed"] else ""
        clients = f"{last['num_clients']}{failed}"
    figures = [last.get(name) for name in _FIGURES]
    shown = ["" if figure is None else f"{figure:.3f}" for figure in figures]
    ago = ""
    if run.changed is not None:
        seconds = datetime.now(UTC).timestamp() - run.changed
        ago = f"{duration(max(seconds, 0.0))} ago"
    rounds = "" if run.num_rounds is None else f"{run.num_rounds_done}/{run.num_rounds}"
    return run.name, run.state, rounds, clients, *shown, ago
