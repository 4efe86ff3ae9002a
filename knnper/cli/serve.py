"""``knnper serve``: predictions of one client over HTTP."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.output import say

if TYPE_CHECKING:
    from client.service.access import Tokens
    from client.service.server import Binding
    from client.settings import ClientSettings

ClientFile = Annotated[
    Path,
    typer.Option("--config", metavar="CLIENT.yaml", help="The client's file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, as in --set service.port=8081; may be repeated.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the owner's token, which may do everything; by default `token` "
        "in the client's state folder. Made, with a new token, if it is missing. "
        "`knnper token` makes others.",
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="Answer without a token, on a loopback address only."
    ),
]


def serve(
    config: ClientFile,
    overrides: Overrides = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
) -> None:
    """Serve a client's predictions until SIGTERM or Ctrl-C."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from client.residence.residence import Residence
    from client.residence.served_model import open_served
    from client.service.app import make_service
    from client.service.budget import Limits
    from client.service.server import serve as serve_app
    from client.settings import read_client

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = read_client(config, overrides or ())
    residence = Residence(settings.state, settings.name)
    binding = _binding(settings)
    _warn(binding)
    limits = Limits(
        max_request_bytes=settings.service.max_request_mb * 1_000_000,
        max_pixels=settings.service.max_megapixels * 1_000_000,
        seconds=settings.service.max_seconds,
    )
    app = make_service(
        settings.name,
        lambda: open_served(residence, writable=True),
        tokens=_tokens(settings, binding, token_file, no_token),
        limits=limits,
    )
    serve_app(
        app,
        binding,
        lambda address: say(f"{settings.name} serves at {address}"),
        limits.sockets,
    )


def _binding(settings: "ClientSettings") -> "Binding":
    from client.service.server import Binding

    service = settings.service
    if service.tls is None:
        return Binding(service.host, service.port)
    return Binding(service.host, service.port, service.tls.certificate, service.tls.key)


def _warn(binding: "Binding") -> None:
    from client.service.server import is_loopback

    if not is_loopback(binding.host) and binding.certificate is None:
        say(
            f"Warning: {binding.host} is open to other machines, without TLS: whoever "
            "sees the traffic reads the token and all inputs. Set service.tls, or "
            "service.host: 127.0.0.1"
        )


def _tokens(
    settings: "ClientSettings",
    binding: "Binding",
    token_file: Path | None,
    no_token: bool,
) -> "Tokens | None":
    from client.service.access import Tokens, read_or_create_owner_token
    from client.service.server import is_loopback
    from knnper.config.errors import RunError

    if no_token:
        if not is_loopback(binding.host):
            raise RunError(
                f"found --no-token with the address {binding.host}, expected a "
                "loopback one: everybody could read and change the client's memory. "
                "Leave out --no-token, or set service.host=127.0.0.1"
            )
        return None
    path = token_file or settings.state / "token"
    tokens = Tokens(settings.state, read_or_create_owner_token(path))
    say(f"The owner's token is in {path}; for others: knnper token add")
    return tokens
