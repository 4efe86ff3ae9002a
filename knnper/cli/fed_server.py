"""``knnper fed init``, ``renew`` and ``server``: a federation's server."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.fed_clients import FederationPath
from knnper.cli.options import set_option
from knnper.cli.terminal import say
from knnper.errors import write_harmlessly

_HOST_HELP = "Name or IP address under which clients reach the server; may be repeated."
Hosts = Annotated[
    list[str], typer.Option("--host", metavar="NAME_OR_IP", help=_HOST_HELP)
]
MoreHosts = Annotated[
    list[str] | None, typer.Option("--host", metavar="NAME_OR_IP", help=_HOST_HELP)
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client", metavar="NAME", help="A client to create; may be repeated."
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The port for clients.")]
ControlPort = Annotated[
    int, typer.Option(min=1, max=65535, help="Flower's control port, on loopback only.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No encryption, no authentication.")
]
Days = Annotated[
    int, typer.Option(min=1, help="Validity of the server's certificate in days.")
]
NewFederation = Annotated[
    Path, typer.Argument(metavar="FEDERATION", help="The federation's new folder.")
]
ServerOverrides = Annotated[list[str] | None, set_option("listen=0.0.0.0:9000")]


def init(
    federation: NewFederation,
    host: Hosts,
    client: Clients = None,
    port: Port = 8443,
    control_port: ControlPort = 8000,
    insecure: Insecure = False,
    days: Days = 825,
) -> None:
    """Create a federation: certificate authority, server files and first clients."""
    from knnper.server.link.authorized import require_name
    from knnper.server.link.setup import FederationFolder, add_client, create_federation
    from knnper.transport.credentials import Address

    for name in client or ():
        require_name(name)
    place = FederationFolder(federation)
    create_federation(place, host, port, control_port, insecure, days)
    for name in client or ():
        add_client(place, name, Address(host[0], port))
    on_site = "knnper fed server server.yaml"
    say(f"Server: copy {place.server} to its machine; there: {on_site}")
    say(f"Clients: copy each folder of {place.path / 'clients'} to its machine.")
    if insecure:
        say("Warning: nothing is encrypted, and any machine can join as a client.")
    else:
        say(f"Keep {place.authority} secret: its ca.key can impersonate the server.")


def renew(federation: FederationPath, host: MoreHosts = None, days: Days = 825) -> None:
    """Renew the server's certificate; a running server reloads it."""
    from knnper.server.link.setup import federation_folder
    from knnper.server.link.setup import renew as renew_certificate

    place = federation_folder(federation)
    names = renew_certificate(place, host or (), days)
    say(f"New certificate for {', '.join(names)}, valid for {days} days.")
    say(
        f"On the server's machine, replace server.crt and server.key of {place.server}."
    )


def server(federation: FederationPath, overrides: ServerOverrides = None) -> None:
    """Run the server: Flower's SuperLink, and the gateway for clients."""
    from knnper.server.link.server import run_server
    from knnper.server.link.setup import server_file
    from knnper.server.link.superlink import LOG_LAYOUT
    from knnper.server.settings import read_server

    settings_file = server_file(federation)
    settings = read_server(settings_file, overrides or ())
    write_harmlessly(LOG_LAYOUT)
    # Do not log every request and connection.
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if settings.insecure:
        say(
            "Warning: insecure: true. Nothing is encrypted, and any machine that "
            f"reaches {settings.listen} can join as a client."
        )
    ready = f"Server {settings.name} is ready: clients connect to {settings.listen};"
    flowers = f"for Flower's commands: export FLWR_HOME={settings.flower_home}"
    run_server(settings, settings_file.resolve(), lambda: say(f"{ready} {flowers}"))
