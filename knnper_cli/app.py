"""The command ``knnper``."""

from collections.abc import Callable
from typing import Annotated

import typer

import knnper
from knnper_cli.batches import compare, moved, report, sweep
from knnper_cli.federation import federation, server, submit, watch
from knnper_cli.simulate import datasets, export, methods, partition, simulate
from knnper_cli.site import client, data, doctor, onboard, serve, token
from knnper_cli.store import store
from knnper_cli.terminal import ErrorReportingGroup

app = typer.Typer(
    name="knnper",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"knnper {knnper.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Personalised federated learning through local memorisation (kNN-Per)."""


_COMMANDS: tuple[Callable[..., None], ...] = (
    simulate,
    compare,
    sweep,
    report,
    partition,
    methods,
    datasets,
    server,
    client,
    submit,
    watch,
    export,
    onboard,
    serve,
    doctor,
)
for _command in _COMMANDS:
    app.command()(_command)
for _name in ("reproduce", "figure"):
    app.command(
        _name,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(moved)
app.add_typer(federation)
app.add_typer(data)
app.add_typer(store)
app.add_typer(token)


def main() -> None:
    """Run the command that was typed."""
    app()
