"""``knnper server``: the server of a federation."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.output import say
from knnper.transport.foreign_text import write_harmlessly

ServerFile = Annotated[
    Path, typer.Argument(metavar="SERVER.yaml", help="The server's settings.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, as in --set listen=0.0.0.0:9000; may be repeated.",
    ),
]


def server(settings_file: ServerFile, overrides: Overrides = None) -> None:
    """Run the server: Flower's SuperLink, and the gateway that clients reach."""
    from server.link.supervisor import run_server
    from server.settings import ServerSettings, read_server

    settings = read_server(settings_file, overrides or ())
    _log_to_standard_error()
    if settings.insecure:
        say(
            "Warning: insecure: true. Nothing is encrypted, and whoever reaches "
            f"{settings.listen} is a client."
        )

    def tell(settings: ServerSettings = settings) -> None:
        say(
            f"Server {settings.name} is ready: clients connect to {settings.listen}; "
            f"for Flower's commands: export FLWR_HOME={settings.flower_home}"
        )

    run_server(settings, settings_file.resolve(), tell)


def _log_to_standard_error() -> None:
    write_harmlessly("%(asctime)s %(levelname)s %(name)s: %(message)s")
    # One line a request and one a connection are no news.
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
