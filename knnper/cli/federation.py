"""The commands of ``knnper fed``."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.audit_log import audit_server
from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.fed_clients import (
    FederationPath,
    add_client,
    list_clients,
    register,
    remove_client,
    rotate_key,
)
from knnper.cli.fed_runs import export, status, submit
from knnper.cli.fed_server import init, renew, server
from knnper.cli.options import AsJson, ClientFile, Verbose
from knnper.cli.terminal import CLIENT_APP

AllowAppCode = Annotated[
    bool,
    typer.Option(
        "--allow-app-code",
        help="Run the code that comes with a run instead of the installed client, in "
        "Flower's own node. Every submitter of runs can then run any code on this "
        "machine.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="How long to try to join the federation."
    ),
]
RetryForever = Annotated[
    bool, typer.Option("--retry-forever", help="Retry without a limit.")
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


def doctor(federation: FederationPath, as_json: AsJson = False) -> None:
    """Diagnose a server on its own machine, and suggest fixes.

    Nothing is changed, and a running server is not disturbed. The exit code is 1 when a
    check fails, 2 when server.yaml is invalid.
    """
    from knnper.cli.diagnosis import diagnose, server_verdict
    from knnper.server.link.doctor import server_checks
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    file = server_file(federation)
    settings = read_server(file)
    checks = server_checks(settings)
    diagnose("server", settings.name, file, checks, server_verdict, as_json=as_json)


def client(
    config: ClientFile = Path("client.yaml"),
    allow_app_code: AllowAppCode = False,
    patience: Patience = 120.0,
    retry_forever: RetryForever = False,
    verbose: Verbose = False,
    app: App = None,
) -> None:
    """Take part in a federation until Ctrl-C or SIGTERM."""
    import knnper.transport  # noqa: F401 (switches off Flower's telemetry and update check)
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
    # The client has closed its files; a normal exit would wait for Flower's threads.
    logging.shutdown()
    os._exit(0)


_COMMANDS: tuple[Callable[..., None], ...] = (
    init,
    server,
    client,
    submit,
    status,
    doctor,
    export,
    add_client,
    register,
    rotate_key,
    remove_client,
    renew,
)
for _command in _COMMANDS:
    federation.command()(_command)


federation.command(name="list")(list_clients)
federation.command(name="audit")(audit_server)
