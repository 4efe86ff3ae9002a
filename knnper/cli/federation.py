"""The commands of ``knnper fed``."""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.terminal import (
    APPS,
    CLIENT_APP,
    INTERRUPTED,
    WRONG_USAGE,
    AsJson,
    ClientFile,
    ErrorReportingGroup,
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    Verbose,
    counted,
    how_to_resume,
    listed,
    print_json,
    print_table,
    require_start,
    say,
    set_option,
    show_run,
)
from knnper.errors import ConfigError, KnnPerError, RunError, write_harmlessly

# What loads torch is imported inside the commands: `knnper --help` need not wait.
if TYPE_CHECKING:
    from knnper.cli.watching import Watch
    from knnper.server.link.authorized import AuthorizedFolder
    from knnper.server.settings import ServerSettings

Federation = Annotated[
    Path,
    typer.Argument(
        metavar="FEDERATION", help="The federation's folder, or its server.yaml."
    ),
]
ClientName = Annotated[str, typer.Argument(metavar="NAME", help="The client's name.")]
PublicKey = Annotated[
    Path, typer.Argument(metavar="PUBKEY", help="The client's NAME.key.pub.")
]
OwnPublicKey = Annotated[
    Path | None,
    typer.Argument(
        metavar="PUBKEY",
        help="The public half of a key that the client has made itself.",
        show_default="a new key is made",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_IP",
        help="Under which this client reaches the server.",
        show_default="the first one of `init`",
    ),
]
NumTrain = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="On how many examples it trains: it weighs as much in the mean.",
        show_default="as many as it says, within run.federation.max_share",
    ),
]
_HOST_HELP = "Name or IP address under which clients reach the server; may be repeated."
Hosts = Annotated[
    list[str], typer.Option("--host", metavar="NAME_OR_IP", help=_HOST_HELP)
]
MoreHosts = Annotated[
    list[str] | None, typer.Option("--host", metavar="NAME_OR_IP", help=_HOST_HELP)
]
Clients = Annotated[
    list[str] | None,
    typer.Option("--client", metavar="NAME", help="A first client; may be repeated."),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port.")]
ControlPort = Annotated[
    int, typer.Option(min=1, max=65535, help="Flower's own port, on loopback only.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Neither encryption nor authentication.")
]
Days = Annotated[
    int, typer.Option(min=1, help="How long the server's certificate is valid.")
]
NewFederation = Annotated[
    Path, typer.Argument(metavar="FEDERATION", help="The federation's new folder.")
]
ServerOverrides = Annotated[list[str] | None, set_option("listen=0.0.0.0:9000")]
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
        help="How long the server hands the model to late clients. Shorthand for "
        "--set run.federation.stay_s=...",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Do not wait until the run is done.")
]
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
AllowAppCode = Annotated[
    bool,
    typer.Option(
        "--allow-app-code",
        help="Run the code that comes with a run instead of the installed client. "
        "Whoever may submit runs may then run any code on this machine.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="How long to try to get into the federation."
    ),
]
RetryForever = Annotated[
    bool, typer.Option("--retry-forever", help="Never give up trying.")
]
App = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", hidden=True, help="Another installed ClientApp."
    ),
]
federation = typer.Typer(
    name="fed",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Set up, run and train a federation of real clients.",
)


def add_client(
    federation: Federation,
    name: ClientName,
    host: Host = None,
    num_train: NumTrain = None,
) -> None:
    """Make a new client's key and settings, and let it in."""
    from knnper.server.link.setup import add_client as write_client
    from knnper.server.link.setup import federation_folder, known_server

    folder = federation_folder(federation)
    written = write_client(folder, name, known_server(folder, host), num_train)
    elsewhere = f"knnper fed register FEDERATION {name} {name}.key.pub"
    say(f"Copy {written} to the client's machine.")
    say(f"A server of {folder.server} lets it in now; elsewhere: {elsewhere}")


def register(
    federation: Federation,
    name: ClientName,
    key: PublicKey,
    num_train: NumTrain = None,
) -> None:
    """Let a client in whose public key is known."""
    from knnper.transport.credentials import fingerprint, read_public_key

    public_key = read_public_key(key)
    folder = _authorized(federation)
    folder.add(name, public_key, num_train)
    say(f"{name} ({fingerprint(public_key)}) may connect; see {folder.path}.")


def rotate_key(
    federation: Federation, name: ClientName, key: OwnPublicKey = None
) -> None:
    """Replace a client's key: the old one is refused from now on.

    The client keeps its name, its number of examples and its state.
    """
    from knnper.server.link import setup
    from knnper.transport.credentials import read_public_key

    if key is not None:
        _authorized(federation).replace(name, read_public_key(key))
        say(f"{name} may connect with {key} alone; a running server knows it now.")
        return
    folder = setup.federation_folder(federation)
    written = setup.rotate_key(folder, name)
    elsewhere = f"knnper fed rotate-key FEDERATION {name} {written.name}.pub"
    say(
        f"Copy {written}, {written.name}.pub and {written.name}.replaces to the "
        "client's machine, over the files of the old key. A running client loads the "
        "new key by itself, and keeps its state."
    )
    say(f"A server of {folder.server} refuses the old key now; elsewhere: {elsewhere}")


def remove_client(federation: Federation, name: ClientName) -> None:
    """Let a client in no longer; its key cannot be used again."""
    folder = _authorized(federation)
    folder.remove(name)
    say(f"{name} may not connect any more; a running server drops it now.")
    say("Its key cannot be registered again: should it come back, make it a new one.")


def list_clients(federation: Federation, as_json: AsJson = False) -> None:
    """Show who may connect, who is registered and who is online."""
    from knnper.server.link.registration import census

    clients, problems = census(_settings(federation))
    if as_json:
        print_json(list(map(asdict, clients)))
    else:
        rows = [[one.name, one.status, one.key_sha256] for one in clients]
        print_table(["client", "status", "key"], rows)
    for problem in problems:
        say(problem)


def _settings(federation: Path) -> "ServerSettings":
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    return read_server(server_file(federation))


def _authorized(federation: Path) -> "AuthorizedFolder":
    from knnper.server.link.authorized import AuthorizedFolder

    return AuthorizedFolder(_settings(federation).authorized)


def init(
    federation: NewFederation,
    host: Hosts,
    client: Clients = None,
    port: Port = 8443,
    control_port: ControlPort = 8000,
    insecure: Insecure = False,
    days: Days = 825,
) -> None:
    """Make a new federation: its authority, its server's files, its first clients."""
    from knnper.server.link.authorized import require_name
    from knnper.server.link.setup import FederationFolder, add_client, found
    from knnper.transport.credentials import Address

    for name in client or ():
        require_name(name)
    place = FederationFolder(federation)
    found(place, host, port, control_port, insecure, days)
    for name in client or ():
        add_client(place, name, Address(host[0], port))
    on_site = "knnper fed server server.yaml"
    say(f"Server: copy {place.server} to its machine; there: {on_site}")
    say(f"Clients: copy each folder of {place.path / 'clients'} to its machine.")
    if insecure:
        say("Warning: nothing is encrypted; whoever reaches the server is a client.")
    else:
        secret = "who has its ca.key can pretend to be the server"
        say(f"Keep {place.authority} to yourself: {secret}.")


def renew(federation: Federation, host: MoreHosts = None, days: Days = 825) -> None:
    """Give the server a new certificate; a running server takes it up by itself."""
    from knnper.server.link.setup import federation_folder
    from knnper.server.link.setup import renew as renew_certificate

    place = federation_folder(federation)
    names = renew_certificate(place, host or (), days)
    say(f"New certificate for {', '.join(names)}, valid for {days} days.")
    say(
        f"On the server's machine, replace server.crt and server.key of {place.server}."
    )


def server(federation: Federation, overrides: ServerOverrides = None) -> None:
    """Run the server: Flower's SuperLink, and the gateway that clients reach."""
    from knnper.server.link.server import run_server
    from knnper.server.link.setup import server_file
    from knnper.server.link.superlink import LOG_LAYOUT
    from knnper.server.settings import read_server

    settings_file = server_file(federation)
    settings = read_server(settings_file, overrides or ())
    write_harmlessly(LOG_LAYOUT)
    # One line a request and one a connection are no news.
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if settings.insecure:
        risk = f"Nothing is encrypted; whoever reaches {settings.listen} is a client"
        say(f"Warning: insecure: true. {risk}.")
    ready = f"Server {settings.name} is ready: clients connect to {settings.listen};"
    flowers = f"for Flower's commands: export FLWR_HOME={settings.flower_home}"
    run_server(settings, settings_file.resolve(), lambda: say(f"{ready} {flowers}"))


def submit(
    federation: Federation,
    experiment: OptionalExperimentFile = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    stay: Stay = None,
    detach: Detach = False,
) -> None:
    """Train the clients of a federation, and hand the model to each of them.

    The server runs on this machine. What can be known beforehand is checked first; the
    exit code is 2 when the run is refused, and nothing was changed then.
    """
    from knnper.cli.watching import Watch
    from knnper.server.link import submission
    from knnper.server.run_folder import RunFolder

    require_start(experiment, resume, from_round, output, overwrite)
    changes = list(overrides or ())
    if stay is not None:
        changes.append(f"run.federation.stay_s={float(stay)}")
    with refusing():
        settings = _settings(federation)
        config = _run_config(settings, experiment, changes, output, resume, overwrite)
        place = Path(str(config["output"]))
        require_runnable(federation, settings, config)
    if from_round is not None:
        RunFolder(place).go_back(from_round)
    watch = Watch(place)
    with _saying_where_to_look(settings), _showing_patience(submission.PATIENCE_S):
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
    from knnper.experiment import read_experiment, to_json
    from knnper.models import with_whole_paths
    from knnper.simulation.catalogue import experiment_catalogue, over_sites

    document, place = "", (resume or Path()).resolve()
    if experiment is not None:
        # The run will be on this server, with its own code.
        catalogue = experiment_catalogue(lambda _: settings.door)
        found = read_experiment(experiment, catalogue, changes)
        found = replace(found, model=with_whole_paths(found.model))
        document, changes = to_json(over_sites(found)), []
        place = (output or settings.runs_folder / found.name).resolve()
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
def refusing() -> Iterator[None]:
    """End with exit code 2, and a line, where the block refuses a run."""
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
    """Refuse a run that would end before its first round, as far as can be known."""
    from knnper.cli.flower_apps import order_of, prepare
    from knnper.server.link.doctor import is_running
    from knnper.server.link.registration import UNREGISTERED, control_port
    from knnper.server.run_folder import RunFolder

    if not is_running(settings.state):
        raise RunError(
            f"the server of {federation} does not run on this machine; start it: "
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
    if settings.insecure:  # whoever comes is a client
        return
    if len(nodes) < least:
        raise RunError(
            f"expected at least {counted(least, 'client')}, found {len(nodes)} "
            f"registered; let some in: knnper fed add-client {federation} NAME"
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
    """Name the clients that are offline, and when the run begins without them."""
    named = f"; offline: {listed(away)}"
    if not waits_for_all:
        return named
    return (
        f"{named}. After that it begins with the clients that are online; to begin "
        "sooner, set run.federation.min_clients"
    )


def status(
    federation: Federation,
    run: OptionalRun = None,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Show the server, the clients and the runs of a federation.

    With --follow, the exit code is 1 when the run ends without results.
    """
    from knnper.cli.overview import run_folder, show, take_snapshot
    from knnper.cli.watching import Watch

    if follow and as_json:
        raise typer.BadParameter("--json is for a snapshot: not with --follow")
    settings = _settings(federation)
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
        raise RunError(f"nobody leads the run in {folder.path}, and it is not done")
    show_run(folder.path)


def doctor(federation: Federation, as_json: AsJson = False) -> None:
    """Diagnose a server on its own machine, and suggest fixes.

    Nothing is changed, and a server that runs is not disturbed. The exit code is 1
    when something is wrong, 2 when server.yaml is.
    """
    from knnper.cli.diagnosis import diagnose, server_verdict
    from knnper.server.link.doctor import server_checks
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    file = server_file(federation)
    settings = read_server(file)
    checks = server_checks(settings)
    diagnose("server", settings.name, file, checks, server_verdict, as_json=as_json)


@contextlib.contextmanager
def _saying_where_to_look(settings: "ServerSettings") -> Iterator[None]:
    """Say where to look for a run that the user no longer waits for."""
    from knnper.server.link.superlink import CONNECTION

    try:
        yield
    except KeyboardInterrupt as error:
        look = f"FLWR_HOME={settings.flower_home} flwr list {CONNECTION}"
        say(f"Interrupted; the server may have taken the run. Look for it: {look}")
        raise typer.Exit(INTERRUPTED) from error


@contextlib.contextmanager
def _showing_patience(most_s: float) -> Iterator[None]:
    """Say now and then that the block is waiting, and for how long at most."""
    done = threading.Event()

    def remind() -> None:
        began = time.monotonic()
        while not done.wait(REMIND_S):
            waited = f"{time.monotonic() - began:.0f} of at most {most_s:.0f} s"
            say(f"Waiting for the server to take the run: {waited}")

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

    has_ended = _enduring(lambda: submission.status(settings, run_id).is_finished)
    try:
        done = watch.follow(has_ended)
    except KeyboardInterrupt as error:
        end = f"FLWR_HOME={settings.flower_home} flwr stop {run_id} federation"
        follow = f"knnper fed status {federation} {place} --follow"
        say(f"The run goes on. To watch: {follow}. To end it: {end}")
        raise typer.Exit(INTERRUPTED) from error
    if not done:
        why = submission.why_ended(settings, run_id)
        advice = how_to_resume(f"fed submit {federation}", place)
        parts = (f"run {run_id} ended without results: {why}", advice)
        raise RunError("\n".join(filter(None, parts)))
    show_run(place)


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


def client(
    config: ClientFile = Path("client.yaml"),
    allow_app_code: AllowAppCode = False,
    patience: Patience = 120.0,
    retry_forever: RetryForever = False,
    verbose: Verbose = False,
    app: App = None,
) -> None:
    """Take part in a federation until Ctrl-C or SIGTERM."""
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from knnper.client.node import NodeOptions, run_client
    from knnper.client.node_log import log_to_stderr
    from knnper.client.settings import read_client

    log_to_stderr(verbose=verbose)
    options = NodeOptions(
        app=app or CLIENT_APP,
        allow_app_code=allow_app_code,
        patience_s=None if retry_forever else patience,
        verbose=verbose,
    )
    run_client(read_client(config), options)
    # All was left in order, and Python's own way out waits for Flower's idle threads.
    logging.shutdown()
    os._exit(0)


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to; a new folder.")
    ],
) -> None:
    """Write a finished run's global model to a folder.

    Sites that join later serve it, and training starts from it: model.weights=FOLDER.
    """
    from knnper.simulation.trained_model import stored_model
    from knnper.strategies.core.exported_model import save_model

    model = stored_model(run)
    save_model(folder, model)
    say(f"{folder} holds the model {model.fingerprint[:12]} of {run}.")
    say(f"A site that joins runs: knnper site onboard client.yaml --model {folder}")


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(init, server, client, submit, status, doctor, export),
    *(add_client, register, rotate_key, remove_client, renew),
)


for _command in _COMMANDS:
    federation.command()(_command)


federation.command(name="list")(list_clients)
