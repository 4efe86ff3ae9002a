"""``knnper federation init`` and ``renew``: certificates and files."""

from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.federation.options import Folder
from knnper.cli.output import say

if TYPE_CHECKING:
    from server.link.layout import FederationFolder

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
    from knnper.config.address import Address
    from server.link.authorized import require_name
    from server.link.founding import Founding, add_client, found
    from server.link.layout import FederationFolder

    for name in client or ():
        require_name(name)
    place = FederationFolder(folder)
    found(place, Founding(host, port, control_port, insecure, days))
    for name in client or ():
        add_client(place, name, Address(host[0], port))
    _tell_what_next(place, insecure)


def renew(folder: Folder, host: MoreHosts = None, days: Days = 825) -> None:
    """Give the server a new certificate; a running server takes it up by itself."""
    from server.link.founding import renew as renew_certificate
    from server.link.layout import FederationFolder

    place = FederationFolder(folder)
    names = renew_certificate(place, host or (), days)
    say(
        f"New certificate for {', '.join(names)}, valid for {days} days. On the "
        f"server's machine it replaces server.crt and server.key of {place.server}."
    )


def _tell_what_next(place: "FederationFolder", insecure: bool) -> None:
    say(f"Server: copy {place.server} to its machine; there: knnper server server.yaml")
    say(f"Clients: copy each folder of {place.path / 'clients'} to its machine.")
    if insecure:
        say(
            "Warning: nothing is encrypted, and whoever reaches the server is a client."
        )
        return
    say(
        f"Keep {place.authority} to yourself: who has its ca.key can pretend to be the "
        "server."
    )
