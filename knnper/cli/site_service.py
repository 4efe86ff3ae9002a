"""``knnper site serve`` and ``token``: a client's prediction service and tokens."""

import functools
import logging
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.formats import as_time
from knnper.cli.options import AsJson, ClientFile, set_option
from knnper.cli.terminal import print_json, print_table, say, tell

if TYPE_CHECKING:
    from knnper.client.service.tokens import Tokens
    from knnper.client.settings import ClientSettings

ClientOverrides = Annotated[list[str] | None, set_option("service.port=8081")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File of the owner's token, which permits everything; created if it is "
        "missing. `knnper site token` creates other tokens.",
        show_default="`token` in the client's state folder",
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="Serve without tokens; on a loopback address only."
    ),
]
_NICENESS = 10
token = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Create, list and revoke tokens of a client's service.",
)
TokenName = Annotated[
    str, typer.Argument(metavar="NAME", help="The token's name, such as ward-3-tablet.")
]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="A permission: predict (the default), probabilities, neighbors, read, "
        "add, delete or metrics; may be repeated.",
    ),
]


def serve(
    config: ClientFile,
    overrides: ClientOverrides = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
) -> None:
    """Serve a client's predictions until SIGTERM or Ctrl-C."""
    from knnper.process import import_extra

    import_extra("prometheus_client", "service", "knnper site serve")
    from knnper.audit_log import AuditLog
    from knnper.client.served_model import open_served
    from knnper.client.service.app import make_service
    from knnper.client.service.bodies import RequestLimits
    from knnper.client.service.server import serve as serve_app
    from knnper.client.settings import read_client
    from knnper.client.site_state import SiteState

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = read_client(config, overrides or ())
    site_state = SiteState(settings.state, settings.name, door=settings.door)
    binding = settings.service
    if not binding.address.is_loopback and binding.tls is None:
        risk = "the network can read the token and all inputs"
        exposed = (
            f"Warning: {binding.host} is open to other machines, without TLS: {risk}"
        )
        say(f"{exposed}. Set service.tls, or service.host: 127.0.0.1")
    limits = RequestLimits(
        max_request_bytes=binding.max_request_mb * 1_000_000,
        max_pixels=binding.max_megapixels * 1_000_000,
        seconds=binding.max_seconds,
    )
    tokens = _tokens(settings, token_file, no_token)
    opening = functools.partial(open_served, site_state, binding.privacy)
    app = make_service(
        settings.name,
        opening,
        tokens=tokens,
        limits=limits,
        record=AuditLog.of(settings.state).append,
        privacy=binding.privacy,
    )
    if binding.privacy is not None:
        # Computed now, so that a missing package ends the command at its start.
        say(
            f"Answers are private, with epsilon {binding.privacy.epsilon:g} for every "
            f"stored example: a budget of {binding.privacy.budget:.3g} (zCDP)"
        )
    ready = f"{settings.name} serves at"
    # In another process, since the comparison loads all of the data.
    comparing = multiprocessing.get_context("spawn").Process(
        target=_report_changes_in_process,
        args=(settings, config, os.getpid()),
        daemon=True,
    )
    comparing.start()
    serve_app(app, binding, lambda place: say(f"{ready} {place}"))


def _tokens(
    settings: "ClientSettings", token_file: Path | None, no_token: bool
) -> "Tokens | None":
    from knnper.client.service.tokens import Tokens, read_or_create_owner_token
    from knnper.errors import RunError

    if no_token:
        if not settings.service.address.is_loopback:
            raise RunError(
                f"found --no-token with the address {settings.service.host}, expected "
                "a loopback address: any machine could change the client's memory"
            )
        return None
    path = token_file or settings.state / "token"
    tokens = Tokens(settings.state, read_or_create_owner_token(path))
    say(f"The owner's token is in {path}; for others: knnper site token add")
    return tokens


def report_changes(settings: "ClientSettings", config: Path) -> None:
    """Report if a client's data differs from its memory."""
    from knnper.client.onboarding import read_changes
    from knnper.client.site_state import SiteState
    from knnper.errors import KnnPerError

    try:
        site_state = SiteState(settings.state, settings.name, door=settings.door)
        compared = read_changes(settings, site_state)
    except (KnnPerError, OSError) as error:
        say(f"The data cannot be compared with the memory: {error}")
        return
    if compared is not None and compared.changes:
        say(
            f"The data has changed since the memory was built: {compared.changes}."
            f" To update the memory: knnper site refresh {config}"
        )


def _report_changes_in_process(
    settings: "ClientSettings", config: Path, parent: int
) -> None:
    from knnper.lifeline import die_with_parent

    die_with_parent(parent)
    os.nice(_NICENESS)
    logging.getLogger().setLevel(logging.WARNING)
    report_changes(settings, config)


@token.command()
def add(config: ClientFile, name: TokenName, scopes: Scopes = None) -> None:
    """Create a token and print it; it is never shown again."""
    from knnper.client.service.tokens import SCOPES, add_token
    from knnper.settings import alternatives

    requested = scopes or ["predict"]
    for scope in requested:
        if scope not in SCOPES:
            raise typer.BadParameter(
                f"--scope: found {scope!r}, {alternatives(scope, SCOPES)}"
            )
    known = [scope for scope in SCOPES if scope in requested]
    secret = add_token(_claimed_state(config), name, known)
    say(f"The token {name} may: {'; '.join(SCOPES[scope] for scope in known)}")
    tell(secret)


@token.command("list")
def list_tokens(config: ClientFile, as_json: AsJson = False) -> None:
    """List the tokens by name, without the owner's token."""
    from knnper.client.service.tokens import read_tokens
    from knnper.client.settings import read_client

    rows = [
        (entry.name, ", ".join(entry.scopes), as_time(entry.made)[:10])
        for entry in read_tokens(read_client(config).state)
    ]
    header = ("name", "scopes", "made")
    if as_json:
        print_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        print_table(header, rows)


@token.command()
def revoke(config: ClientFile, name: TokenName) -> None:
    """Revoke a token; a running service rejects it from now on."""
    from knnper.client.service.tokens import revoke_token

    revoke_token(_claimed_state(config), name)
    say(f"The token {name} is revoked")


def _claimed_state(config: Path) -> Path:
    from knnper.client.settings import read_client
    from knnper.client.state import StateFolder, claim

    settings = read_client(config)
    claim(StateFolder(settings.state), settings.name, None)
    return settings.state
