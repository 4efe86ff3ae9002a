"""The commands of ``knnper fed``."""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.errors import RunError, write_harmlessly
from knnper_cli.terminal import (
    INTERRUPTED,
    AsJson,
    ClientFile,
    ErrorReportingGroup,
    FromRound,
    OptionalExperimentFile,
    Overrides,
    Overwrite,
    Resume,
    Verbose,
    how_to_resume,
    print_json,
    print_table,
    require_start,
    say,
    set_option,
    show_run,
)

# What loads torch is imported inside the commands: `knnper --help` need not wait.
if TYPE_CHECKING:
    from knnper.server.link.authorized import AuthorizedFolder
    from knnper.server.settings import ServerSettings
    from knnper_cli.watching import Watch

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The federation's folder.")
]
Place = Annotated[
    Path,
    typer.Argument(
        metavar="SERVER.yaml", help="The server's settings, or the federation's folder."
    ),
]
ClientName = Annotated[str, typer.Argument(metavar="NAME", help="The client's name.")]
PublicKey = Annotated[
    Path, typer.Argument(metavar="PUBKEY", help="The client's NAME.key.pub.")
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


def add_client(
    folder: Folder, name: ClientName, host: Host = None, num_train: NumTrain = None
) -> None:
    """Make a new client's key and settings, and let it in."""
    from knnper.server.link.setup import FederationFolder, known_server
    from knnper.server.link.setup import add_client as write_client

    place = FederationFolder(folder)
    written = write_client(place, name, known_server(place, host), num_train)
    elsewhere = f"knnper fed register SERVER.yaml {name} {name}.key.pub"
    say(f"Copy {written} to the client's machine.")
    say(f"A server of {place.server} lets it in now; elsewhere: {elsewhere}")


def register(
    server: Place, name: ClientName, key: PublicKey, num_train: NumTrain = None
) -> None:
    """Let a client in whose public key is known."""
    from knnper.transport.credentials import fingerprint, read_public_key

    public_key = read_public_key(key)
    folder = _authorized(server)
    folder.add(name, public_key, num_train)
    say(f"{name} ({fingerprint(public_key)}) may connect; see {folder.path}.")


def remove_client(server: Place, name: ClientName) -> None:
    """Let a client in no longer; its key cannot be used again."""
    folder = _authorized(server)
    folder.remove(name)
    say(f"{name} may not connect any more; a running server drops it now.")
    say("Its key cannot be registered again: should it come back, make it a new one.")


def list_clients(server: Place, as_json: AsJson = False) -> None:
    """Show who may connect, who is registered and who is online."""
    from knnper.server.link.registration import census
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    clients, problems = census(read_server(server_file(server)))
    if as_json:
        print_json(list(map(asdict, clients)))
    else:
        rows = [[one.name, one.status, one.key_sha256] for one in clients]
        print_table(["client", "status", "key"], rows)
    for problem in problems:
        say(problem)


def _authorized(server: Path) -> "AuthorizedFolder":
    from knnper.server.link.authorized import AuthorizedFolder
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    return AuthorizedFolder(read_server(server_file(server)).authorized)


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


def init(
    folder: Folder,
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
    place = FederationFolder(folder)
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


def renew(folder: Folder, host: MoreHosts = None, days: Days = 825) -> None:
    """Give the server a new certificate; a running server takes it up by itself."""
    from knnper.server.link.setup import FederationFolder
    from knnper.server.link.setup import renew as renew_certificate

    place = FederationFolder(folder)
    names = renew_certificate(place, host or (), days)
    say(f"New certificate for {', '.join(names)}, valid for {days} days.")
    say(
        f"On the server's machine, replace server.crt and server.key of {place.server}."
    )


ServerFile = Annotated[
    Path, typer.Argument(metavar="SERVER.yaml", help="The server's settings.")
]
ServerOverrides = Annotated[list[str] | None, set_option("listen=0.0.0.0:9000")]


def server(settings_file: ServerFile, overrides: ServerOverrides = None) -> None:
    """Run the server: Flower's SuperLink, and the gateway that clients reach."""
    from knnper.server.link.supervisor import run_server
    from knnper.server.settings import read_server

    settings = read_server(settings_file, overrides or ())
    write_harmlessly("%(asctime)s %(levelname)s %(name)s: %(message)s")
    # One line a request and one a connection are no news.
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if settings.insecure:
        risk = f"Nothing is encrypted; whoever reaches {settings.listen} is a client"
        say(f"Warning: insecure: true. {risk}.")
    ready = f"Server {settings.name} is ready: clients connect to {settings.listen};"
    flowers = f"for Flower's commands: export FLWR_HOME={settings.flower_home}"
    run_server(settings, settings_file.resolve(), lambda: say(f"{ready} {flowers}"))


SERVER_MAY_BE_AWAY_S = 60.0
REMIND_S = 30.0
SubmitServerFile = Annotated[
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
    server: SubmitServerFile = Path("server.yaml"),
    output: Output = None,
    resume: Resume = None,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    stay: Stay = None,
    detach: Detach = False,
) -> None:
    """Train the clients of a federation, and hand the model to each of them."""
    from knnper.experiment import read_experiment, to_json
    from knnper.models import with_whole_paths
    from knnper.server.link import submission
    from knnper.server.run_folder import RunFolder
    from knnper.server.settings import read_server
    from knnper.simulation.workbench import experiment_catalogue, over_sites
    from knnper_cli.watching import Watch

    require_start(experiment, resume, from_round, output, overwrite)
    changes = list(overrides or ())
    if stay is not None:
        changes.append(f"run.federation.stay_s={float(stay)}")
    settings = read_server(server)
    if resume is not None:
        document, place = "", resume.resolve()
        RunFolder.open(place).require_idle()
    elif experiment is not None:
        # The run will be on this server, with its own code.
        catalogue = experiment_catalogue(lambda _: settings.door)
        found = read_experiment(experiment, catalogue, changes)
        found = replace(found, model=with_whole_paths(found.model))
        document, changes = to_json(over_sites(found)), []
        place = (output or settings.runs_folder / found.name).resolve()
        RunFolder.require_free(place, overwrite=overwrite)
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
    watch = Watch(place)
    with _saying_where_to_look(settings), _showing_patience(submission.PATIENCE_S):
        run_id = submission.submit(settings, config)
    say(f"Run {run_id} is submitted; everything about it will be in {place}")
    if not detach:
        _wait(settings, run_id, place, watch)


def watch(run: RunFolderArgument) -> None:
    """Show how a run gets on that another process leads."""
    from knnper.server.run_folder import RunFolder

    folder = RunFolder.open(run)
    from knnper_cli.watching import Watch

    def has_ended() -> bool:
        with contextlib.suppress(RunError):
            folder.require_idle()
            return True
        return False

    if not folder.is_finished() and not Watch(run).follow(has_ended):
        raise RunError(f"nobody leads the run in {run}, and it is not done")
    show_run(run)


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


def _wait(settings: "ServerSettings", run_id: int, place: Path, watch: "Watch") -> None:
    from knnper.server.link import submission

    has_ended = _enduring(lambda: submission.status(settings, run_id).is_finished)
    try:
        done = watch.follow(has_ended)
    except KeyboardInterrupt as error:
        end = f"FLWR_HOME={settings.flower_home} flwr stop {run_id} federation"
        say(f"The run goes on. To watch: knnper fed status {place}. To end it: {end}")
        raise typer.Exit(INTERRUPTED) from error
    if not done:
        found = submission.status(settings, run_id)
        try:
            last_words = submission.last_words(settings, run_id)
        except RunError as error:
            last_words = f"The end of its log cannot be shown: {error}"
        how = f"ended without results: {found.outcome} {found.details}"
        resume = how_to_resume("fed submit", place)
        raise RunError(f"run {run_id} {how}\n{last_words}\n{resume}")
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
    from knnper.client.flower_node import CLIENT_APP, log_to_stderr
    from knnper.client.node import NodeOptions, run_client
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


federation = typer.Typer(
    name="fed",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Set up, run and train a federation of real clients.",
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(init, server, client, submit, export),
    *(add_client, register, remove_client, renew),
)
for _command in _COMMANDS:
    federation.command()(_command)
federation.command(name="status")(watch)
federation.command(name="list")(list_clients)
