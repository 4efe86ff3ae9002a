"""``knnper fed add-client``, ``register``, ...: the clients of a federation."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.options import AsJson
from knnper.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from knnper.server.link.authorized import AuthorizedFolder
    from knnper.server.settings import ServerSettings

FederationPath = Annotated[
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
        help="The public key, if the client created its key itself.",
        show_default="create a new key",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_IP",
        help="The server's address for this client.",
        show_default="the first --host of `init`",
    ),
]
NumTrain = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="The number of training examples, its weight in the mean.",
        show_default="as reported, within run.federation.max_share",
    ),
]


def add_client(
    federation: FederationPath,
    name: ClientName,
    host: Host = None,
    num_train: NumTrain = None,
) -> None:
    """Create the key and settings of a new client, and register it."""
    from knnper.server.link.setup import add_client as write_client
    from knnper.server.link.setup import federation_folder, gateway_address

    folder = federation_folder(federation)
    written = write_client(folder, name, gateway_address(folder, host), num_train)
    elsewhere = f"knnper fed register FEDERATION {name} {name}.key.pub"
    say(f"Copy {written} to the client's machine.")
    say(f"A server of {folder.server} accepts it now; on another machine: {elsewhere}")


def register(
    federation: FederationPath,
    name: ClientName,
    key: PublicKey,
    num_train: NumTrain = None,
) -> None:
    """Register a client by its public key."""
    from knnper.transport.credentials import fingerprint, read_public_key

    public_key = read_public_key(key)
    folder = _authorized(federation)
    folder.add(name, public_key, num_train)
    say(f"{name} ({fingerprint(public_key)}) may connect; see {folder.path}.")


def rotate_key(
    federation: FederationPath, name: ClientName, key: OwnPublicKey = None
) -> None:
    """Replace a client's key and revoke the old one.

    The client keeps its name, its number of examples and its state.
    """
    from knnper.server.link import setup
    from knnper.transport.credentials import read_public_key

    if key is not None:
        _authorized(federation).replace(name, read_public_key(key))
        say(f"{name} may connect only with {key}; a running server knows it now.")
        return
    folder = setup.federation_folder(federation)
    written = setup.rotate_key(folder, name)
    elsewhere = f"knnper fed rotate-key FEDERATION {name} {written.name}.pub"
    say(
        f"Copy {written}, {written.name}.pub and {written.name}.replaces to the "
        "client's machine, over the files of the old key. A running client loads the "
        "new key and keeps its state."
    )
    say(
        f"A server of {folder.server} rejects the old key now; on another machine: "
        f"{elsewhere}"
    )


def remove_client(federation: FederationPath, name: ClientName) -> None:
    """Revoke a client; its key cannot be used again."""
    folder = _authorized(federation)
    folder.remove(name)
    say(f"{name} is revoked; a running server disconnects it now.")
    say("Its key cannot be registered again. To readmit it, create a new key.")


def list_clients(federation: FederationPath, as_json: AsJson = False) -> None:
    """List the clients with their status: registered, online, ..."""
    from knnper.server.link.registration import list_clients

    clients, problems = list_clients(server_settings(federation))
    if as_json:
        print_json(list(map(asdict, clients)))
    else:
        rows = [[client.name, client.status, client.key_sha256] for client in clients]
        print_table(["client", "status", "key"], rows)
    for problem in problems:
        say(problem)


def server_settings(federation: Path) -> "ServerSettings":
    """Read the server's settings of a federation."""
    from knnper.server.link.setup import server_file
    from knnper.server.settings import read_server

    return read_server(server_file(federation))


def _authorized(federation: Path) -> "AuthorizedFolder":
    from knnper.server.link.authorized import AuthorizedFolder

    return AuthorizedFolder(server_settings(federation).authorized)
