"""``knnper fed submit``, ``status`` and ``export``: the runs of a federation."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.errors import INTERRUPTED, WRONG_USAGE, how_to_resume
from knnper.cli.fed_clients import FederationPath, server_settings
from knnper.cli.formats import counted, listed
from knnper.cli.options import (
    AsJson,
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    require_start,
)
from knnper.cli.terminal import APPS, print_json, say, show_run
from knnper.errors import ConfigError, KnnPerError, RunError

if TYPE_CHECKING:
    from knnper.cli.watching import Watch
    from knnper.server.settings import ServerSettings

SERVER_MAY_BE_AWAY_S = 60.0
REMIND_S = 30.0
Output = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="RUNS/NAME")
]
Stay = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long the server serves the model to late clients. Shorthand for "
        "--set run.federation.stay_s=...",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait for the run.")]
OptionalRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, or its name in the server's folder of runs.",
        show_default="all runs",
    ),
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow",
        help="Show the progress of RUN, or of the run under way, until it ends.",
    ),
]


def submit(
    federation: FederationPath,
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    stay: Stay = None,
    detach: Detach = False,
) -> None:
    """Train with the clients of a federation, and send each client the model.

    The server must run on this machine. Invalid runs are rejected before anything
    changes, with exit code 2.
    """
    from knnper.audit_log import AuditLog
    from knnper.cli.watching import Watch
    from knnper.server.link import submission
    from knnper.server.run_folder import RunFolder

    require_start(experiment, resume, from_round, output, overwrite)
    changes = list(overrides or ())
    if stay is not None:
        changes.append(f"run.federation.stay_s={float(stay)}")
    with rejecting():
        settings = server_settings(federation)
        config = _run_config(settings, experiment, changes, output, resume, overwrite)
        place = Path(str(config["output"]))
        require_runnable(federation, settings, config)
    if from_round is not None:
        RunFolder(place).go_back(from_round)
    watch = Watch(place)
    with _saying_where_to_look(settings), _showing_patience(submission.PATIENCE_S):
        log = AuditLog.of(settings.state)
        log.append("submit_run", name=place.name, uid=os.getuid())
        run_id = submission.submit(settings, config, APPS)
    say(f"Run {run_id} is submitted; everything about it will be in {place}")
    if not detach:
        _wait(federation, settings, run_id, place, watch)


def _run_config(
    settings: "ServerSettings",
    experiment: Path | None,
    changes: list[str],
    output: Path | None,
    resume: Path | None,
    overwrite: bool,
) -> dict[str, str | bool]:
    """Return the run configuration; see `knnper.cli.flower_apps.order_of`."""
    from knnper.experiment_file import read_experiment, to_json
    from knnper.models import with_whole_paths
    from knnper.simulation.catalogue import experiment_catalogue, over_sites

    document = ""
    place = (resume or Path()).resolve()
    if experiment is not None:
        # The server runs the experiment, with the code that it admits.
        catalogue = experiment_catalogue(lambda _: settings.door)
        described = read_experiment(experiment, catalogue, changes)
        described = replace(described, model=with_whole_paths(described.model))
        document = to_json(over_sites(described))
        changes = []
        place = (output or settings.runs_folder / described.name).resolve()
    return {
        "experiment": "",
        "document": document,
        "set": json.dumps(changes) if changes else "",
        "output": str(place),
        "overwrite": overwrite,
        "resume": resume is not None,
        "registry": str(settings.roster_file) if not settings.insecure else "",
    }


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Turn an error inside the block into one line and exit code 2."""
    try:
        yield
    except KnnPerError as error:
        reason = str(error)
        if isinstance(error, ConfigError) and len(error.problems) == 1:
            reason = " ".join(reason.split("\n  - "))
        say(f"Error: {reason}")
        raise typer.Exit(WRONG_USAGE) from error


def require_runnable(
    federation: Path, settings: "ServerSettings", config: Mapping[str, str | bool]
) -> None:
    """Reject a run that would fail before its first round.

    Checks the server, the run's folder, data and model, and the number of clients.
    """
    from knnper.cli.flower_apps import order_of, prepare
    from knnper.server.link.doctor import is_running
    from knnper.server.link.registration import UNREGISTERED, control_port
    from knnper.server.run_folder import RunFolder

    if not is_running(settings.state):
        raise RunError(
            f"the server of {federation} is not running on this machine; start it: "
            f"knnper fed server {federation}"
        )
    order = order_of(config, settings.door)
    if order.resume:
        RunFolder.open(order.output).require_idle()
    prepare(order)
    with control_port(settings) as control:
        nodes = [node for node in control.nodes() if node.status != UNREGISTERED]
    rules = order.experiment.run.federation
    least = rules.min_clients or 1
    if settings.insecure:  # clients need no registration
        return
    if len(nodes) < least:
        raise RunError(
            f"expected at least {counted(least, 'client')}, found {len(nodes)} "
            f"registered; add clients: knnper fed add-client {federation} NAME"
        )
    away = [node.name for node in nodes if node.status != "online"]
    waits_for_all = not order.resume and rules.min_clients is None
    awaited = len(nodes) if waits_for_all else least
    num_online = len(nodes) - len(away)
    if num_online < awaited:
        absence = _absence(away, waits_for_all=waits_for_all)
        say(
            f"{num_online} of {counted(len(nodes), 'client')} online; the run waits up "
            f"to {rules.wait_for_clients_s:g} s for {awaited} "
            f"(run.federation.wait_for_clients_s){absence}"
        )


def _absence(away: Sequence[str], *, waits_for_all: bool) -> str:
    """Name the offline clients, and when the run starts without them."""
    named = f"; offline: {listed(away)}"
    if not waits_for_all:
        return named
    return (
        f"{named}. After that it begins with the clients that are online; to begin "
        "sooner, set run.federation.min_clients"
    )


def status(
    federation: FederationPath,
    run: OptionalRun = None,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Show the server, the clients and the runs of a federation.

    With --follow, show the progress of a running federation; the exit code is 1 when
    the run ends without results.
    """
    from knnper.cli.overview import run_folder, show, take_snapshot
    from knnper.cli.watching import Watch

    if follow and as_json:
        raise typer.BadParameter("--json is for a snapshot: not with --follow")
    settings = server_settings(federation)
    if not follow:
        snapshot = take_snapshot(settings, run)
        if as_json:
            print_json(snapshot.as_document())
        else:
            show(snapshot)
        return
    folder = run_folder(settings, run)
    watch = Watch(folder.path)
    if not folder.is_finished() and not watch.follow(lambda: not folder.is_led()):
        raise RunError(f"the run in {folder.path} is not done, and no process leads it")
    show_run(folder.path)


@contextlib.contextmanager
def _saying_where_to_look(settings: "ServerSettings") -> Iterator[None]:
    """On Ctrl-C, show how to find a run that the server may have accepted."""
    from knnper.server.link.superlink import CONNECTION

    try:
        yield
    except KeyboardInterrupt as error:
        look = f"FLWR_HOME={settings.flower_home} flwr list {CONNECTION}"
        say(f"Interrupted; the server may have accepted the run. To look: {look}")
        raise typer.Exit(INTERRUPTED) from error


@contextlib.contextmanager
def _showing_patience(most_s: float) -> Iterator[None]:
    """Report every half minute that the block is waiting, and its limit."""
    done = threading.Event()

    def remind() -> None:
        began = time.monotonic()
        while not done.wait(REMIND_S):
            waited = f"{time.monotonic() - began:.0f} of at most {most_s:.0f} s"
            say(f"Waiting for the server to accept the run: {waited}")

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _wait(
    federation: Path,
    settings: "ServerSettings",
    run_id: int,
    place: Path,
    watch: "Watch",
) -> None:
    from knnper.server.link import submission

    has_ended = _during_restarts(
        lambda: submission.status(settings, run_id).is_finished
    )
    try:
        done = watch.follow(has_ended)
    except KeyboardInterrupt as error:
        end = f"FLWR_HOME={settings.flower_home} flwr stop {run_id} federation"
        follow = f"knnper fed status {federation} {place} --follow"
        say(f"The run continues. To watch: {follow}. To stop it: {end}")
        raise typer.Exit(INTERRUPTED) from error
    if not done:
        why = submission.why_ended(settings, run_id)
        advice = how_to_resume(f"fed submit {federation}", place)
        parts = (f"run {run_id} ended without results: {why}", advice)
        raise RunError("\n".join(filter(None, parts)))
    show_run(place)


def _during_restarts(has_ended: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a query of the server, so that it survives the server's restart."""
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


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The new folder of the model.")
    ],
) -> None:
    """Export a finished run's global model to a folder.

    New sites serve it, and training can start from it with model.weights=FOLDER.
    """
    from knnper.simulation.trained_model import stored_model
    from knnper.strategies.core.exported_model import save_model

    model = stored_model(run)
    save_model(folder, model)
    say(f"{folder} holds the model {model.fingerprint[:12]} of {run}.")
    say(f"On a new site: knnper site onboard client.yaml --model {folder}")
