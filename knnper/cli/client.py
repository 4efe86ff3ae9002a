"""``knnper client``: this machine as a client of a federation."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Option("--config", metavar="CLIENT.yaml", help="The client's file.")
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
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Log every message of Flower's, too."),
]
App = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", hidden=True, help="Another installed ClientApp."
    ),
]


def client(
    config: ConfigFile = Path("client.yaml"),
    allow_app_code: AllowAppCode = False,
    patience: Patience = 120.0,
    retry_forever: RetryForever = False,
    verbose: Verbose = False,
    app: App = None,
) -> None:
    """Take part in a federation until Ctrl-C or SIGTERM."""
    # It loads torch and Flower, which `knnper --help` need not wait for.
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from client.node.logs import log_to_stderr
    from client.node.node import NodeOptions, run_client
    from client.node.orders import CLIENT_APP
    from client.settings import read_client

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
