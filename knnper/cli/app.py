"""The command ``knnper``."""

from typing import Annotated

import typer

import knnper
from knnper.cli.datasets import datasets
from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.figure import figure
from knnper.cli.methods import methods
from knnper.cli.partition import partition
from knnper.cli.report import report
from knnper.cli.simulate import simulate
from knnper.cli.store.app import store

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


for _command in (simulate, report, partition, methods, datasets):
    app.command()(_command)
app.add_typer(figure)
app.add_typer(store)


def main() -> None:
    """Run the command that was typed."""
    app()
