"""``knnper token``: who may use a client's service, and what for."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table, say
from knnper.cli.serve import ClientFile

token = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Make, list and revoke the tokens of a client's service.",
)

TokenName = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the token, as in ward-3-tablet.")
]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="What it may; may be repeated: predict (the default), probabilities, "
        "neighbors, read, add, delete, metrics.",
    ),
]


@token.command()
def add(name: TokenName, config: ClientFile, scopes: Scopes = None) -> None:
    """Make a token and write it to standard output; it is never shown again."""
    from client.service.access import SCOPES, add_token
    from knnper.config.suggestions import alternatives

    wanted = scopes or ["predict"]
    for scope in wanted:
        if scope not in SCOPES:
            raise typer.BadParameter(
                f"--scope: found {scope!r}, {alternatives(scope, SCOPES)}"
            )
    known = [scope for scope in SCOPES if scope in wanted]
    secret = add_token(_claimed_state(config), name, known)
    say(f"The token {name} may: {'; '.join(SCOPES[scope] for scope in known)}")
    typer.echo(secret)


@token.command("list")
def list_tokens(config: ClientFile, as_json: AsJson = False) -> None:
    """Show the tokens by name; the owner's, which may do everything, is not listed."""
    from client.service.access import read_tokens
    from client.settings import read_client

    rows = [
        (one.name, ", ".join(one.scopes), _day(one.made))
        for one in read_tokens(read_client(config).state)
    ]
    header = ("name", "scopes", "made")
    if as_json:
        print_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        print_table(header, rows)


@token.command()
def revoke(name: TokenName, config: ClientFile) -> None:
    """Forget a token; a service that runs refuses it from then on."""
    from client.service.access import revoke_token

    revoke_token(_claimed_state(config), name)
    say(f"The token {name} is revoked")


def _claimed_state(config: Path) -> Path:
    """Return the client's state folder, made if it is missing."""
    from client.residence.identity import claim
    from client.residence.places import Places
    from client.settings import read_client

    settings = read_client(config)
    claim(Places(settings.state), settings.name, None)
    return settings.state


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
