"""The command ``knnper``."""

from collections.abc import Callable
from typing import Annotated

import typer

import knnper
from knnper.cli.client import client
from knnper.cli.compare import compare
from knnper.cli.data import data
from knnper.cli.datasets import datasets
from knnper.cli.doctor import doctor
from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.export import export
from knnper.cli.federation.app import federation
from knnper.cli.figures.app import figure
from knnper.cli.methods import methods
from knnper.cli.onboard import onboard
from knnper.cli.partition import partition
from knnper.cli.report import report
from knnper.cli.reproduce import reproduce
from knnper.cli.serve import serve
from knnper.cli.server import server
from knnper.cli.simulate import simulate
from knnper.cli.store.app import store
from knnper.cli.submit import submit, watch
from knnper.cli.sweep import sweep
from knnper.cli.token import token

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
    reproduce,
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
app.add_typer(federation)
app.add_typer(data)
app.add_typer(figure)
app.add_typer(store)
app.add_typer(token)


def main() -> None:
    """Run the command that was typed."""
    app()
