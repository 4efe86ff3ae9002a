"""``knnper submit``, ``knnper watch``: runs over real clients."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.errors import INTERRUPTED
from knnper.cli.options import (
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    require_resume,
)
from knnper.cli.output import print_table, say
from knnper.cli.resumable import how_to_go_on
from knnper.config.errors import RunError

if TYPE_CHECKING:
    from server.settings import ServerSettings

SERVER_MAY_BE_AWAY_S = 60.0
REMIND_S = 30.0

ServerFile = Annotated[
    Path,
    typer.Option(
        "--server",
        metavar="SERVER.yaml",
        help="The server, which runs on this machine.",
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="RUNS/NAME")
]
Stay = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long the server hands the model to late clients. Shorthand for "
        "--set run.federation.stay_s=...",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Do not wait until the run is done.")
]
RunFolderArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder.")
]


def submit(  # noqa: PLR0913 (one parameter an option)
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    server: ServerFile = Path("server.yaml"),
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    stay: Stay = None,
    detach: Detach = False,
) -> None:
    """Train the clients of a federation, and hand the model to each of them."""
    from server.link import submission
    from server.run_folder import RunFolder
    from server.settings import read_server

    if (experiment is None) == (resume is None):
        raise typer.BadParameter("give either EXPERIMENT.yaml or --resume DIR")
    require_resume(from_round, resume)
    changes = list(overrides or ())
    if stay is not None:
        changes.append(f"run.federation.stay_s={float(stay)}")
    settings = read_server(server)
    if resume is not None:
        if output is not None or overwrite:
            raise typer.BadParameter("--resume goes with neither --output, --overwrite")
        document, place = "", resume.resolve()
    elif experiment is not None:
        document, name = _over_sites(experiment, changes)
        place = (output or settings.runs_folder / name).resolve()
        changes = []
    _require_free(place, overwrite, resume is not None)
    if from_round is not None:
        RunFolder(place).go_back(from_round)
    config: dict[str, str | bool] = {
        "experiment": "",
        "document": document,
        "set": json.dumps(changes) if changes else "",
        "output": str(place),
        "overwrite": overwrite,
        "resume": resume is not None,
        "registry": str(settings.roster_file) if not settings.insecure else "",
    }
    follow = _follower(place)
    with _saying_where_to_look(settings), _showing_patience(submission.PATIENCE_S):
        run_id = submission.submit(settings, config)
    say(f"Run {run_id} is submitted; everything about it will be in {place}")
    if not detach:
        _wait(settings, run_id, place, follow)


def watch(run: RunFolderArgument) -> None:
    """Show how a run gets on that another process leads."""
    from server.run_folder import RunFolder

    folder = RunFolder.open(run)
    if not folder.is_finished() and not _follower(run)(lambda: not folder.is_led()):
        raise RunError(f"nobody leads the run in {run}, and it is not done")
    _show(run)


def _over_sites(path: Path, changes: list[str]) -> tuple[str, str]:
    """Return the experiment over sites' data, as JSON, and its name."""
    from knnper.config.document import to_json
    from knnper.config.loading import read_experiment
    from simulation.catalogue import experiment_catalogue
    from simulation.sites import over_sites

    settings = read_experiment(path, experiment_catalogue(), changes)
    return to_json(over_sites(settings)), settings.name


def _require_free(place: Path, overwrite: bool, resume: bool) -> None:
    from server.run_folder import RunFolder

    if resume:
        RunFolder.open(place).require_idle()
    else:
        RunFolder.require_free(place, overwrite=overwrite)


@contextlib.contextmanager
def _saying_where_to_look(settings: "ServerSettings") -> Iterator[None]:
    """Say where to look for a run that the user no longer waits for."""
    from server.link.flower_home import CONNECTION

    try:
        yield
    except KeyboardInterrupt as error:
        say(
            "Interrupted; the server may have taken the run, or take it yet. Before "
            "you submit it again, look for it: "
            f"FLWR_HOME={settings.flower_home} flwr list {CONNECTION}"
        )
        raise typer.Exit(INTERRUPTED) from error


@contextlib.contextmanager
def _showing_patience(most_s: float) -> Iterator[None]:
    """Say now and then that the block is waiting, and for how long at most."""
    done = threading.Event()

    def remind() -> None:
        began = time.monotonic()
        while not done.wait(REMIND_S):
            waited = time.monotonic() - began
            say(
                f"Waiting for the server to take the run: {waited:.0f} of at most "
                f"{most_s:.0f} s. A busy machine needs minutes"
            )

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


Follow = Callable[[Callable[[], bool]], bool]


def _follower(place: Path) -> Follow:
    """Return what shows the run from now on, until it has results or has ended."""
    from knnper.cli.progress import progress_observer
    from knnper.cli.watching import Watch

    def follow(has_ended: Callable[[], bool]) -> bool:
        with progress_observer() as observer:
            return watcher.until_done(observer, has_ended)

    watcher = Watch(place, say)
    return follow


def _wait(settings: "ServerSettings", run_id: int, place: Path, follow: Follow) -> None:
    from server.link import submission

    has_ended = _enduring(lambda: submission.status(settings, run_id).is_finished)
    try:
        done = follow(has_ended)
    except KeyboardInterrupt as error:
        say(
            f"No longer watching; the run goes on. To watch: knnper watch {place}. To "
            f"end it: FLWR_HOME={settings.flower_home} flwr stop {run_id} federation"
        )
        raise typer.Exit(INTERRUPTED) from error
    if not done:
        found = submission.status(settings, run_id)
        raise RunError(
            f"run {run_id} ended without results: {found.outcome} {found.details}\n"
            f"{_last_words(settings, run_id)}\n"
            f"{how_to_go_on('submit', place)}"
        )
    _show(place)


def _last_words(settings: "ServerSettings", run_id: int) -> str:
    from server.link import submission

    try:
        return submission.last_words(settings, run_id)
    except RunError as error:
        return f"The end of its log cannot be shown: {error}"


def _enduring(has_ended: Callable[[], bool]) -> Callable[[], bool]:
    """Return the same question, which a server that starts again may leave open."""
    answered_at = time.monotonic()

    def ask() -> bool:
        nonlocal answered_at
        try:
            ended = has_ended()
        except RunError:
            if time.monotonic() - answered_at > SERVER_MAY_BE_AWAY_S:
                raise
            return False
        answered_at = time.monotonic()
        return ended

    return ask


def _show(place: Path) -> None:
    from simulation.reporting.runs import load_run
    from simulation.reporting.table import as_cells, table_of_run

    header, *rows = as_cells(table_of_run(load_run(place)))
    print_table(header, rows)
    say(f"Everything about this run is in {place}")
