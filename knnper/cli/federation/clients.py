"""``knnper federation``: who may connect."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.federation.options import ClientName, Folder, Place
from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from server.link.authorized import AuthorizedFolder

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
    from server.link.founding import add_client as write_client
    from server.link.founding import known_server
    from server.link.layout import FederationFolder

    place = FederationFolder(folder)
    written = write_client(place, name, known_server(place, host), num_train)
    say(
        f"Copy {written} to the client's machine. A server that runs from "
        f"{place.server} lets it in now; elsewhere: knnper federation register "
        "SERVER.yaml "
        f"{name} {name}.key.pub"
    )


def register(
    server: Place, name: ClientName, key: PublicKey, num_train: NumTrain = None
) -> None:
    """Let a client in whose public key is known."""
    from knnper.transport.credentials.node_keys import fingerprint, read_public_key

    public_key = read_public_key(key)
    folder = _authorized(server)
    folder.add(name, public_key, num_train)
    say(f"{name} ({fingerprint(public_key)}) may connect; see {folder.path}.")


def remove_client(server: Place, name: ClientName) -> None:
    """Let a client in no longer; its key cannot be used again."""
    folder = _authorized(server)
    folder.remove(name)
    say(
        f"{name} may not connect any more; a running server drops it now. Its key "
        "cannot be registered again: should it come back, make it a new one."
    )


def list_clients(server: Place, as_json: AsJson = False) -> None:
    """Show who may connect, who is registered and who is online."""
    from server.link.census import census
    from server.link.layout import server_file
    from server.settings import read_server

    found = census(read_server(server_file(server)))
    if as_json:
        print_json([one.as_document() for one in found.clients])
    else:
        rows = [[one.name, one.status, one.key_sha256] for one in found.clients]
        print_table(["client", "status", "key"], rows)
    for problem in found.problems:
        say(problem)


def _authorized(server: Path) -> "AuthorizedFolder":
    from server.link.authorized import AuthorizedFolder
    from server.link.layout import server_file
    from server.settings import read_server

    return AuthorizedFolder(read_server(server_file(server)).authorized)
