"""The command ``knnper``."""

import gc
from typing import Annotated

import typer

import knnper
from knnper.cli.audit import audit
from knnper.cli.batches import compare, report, sweep
from knnper.cli.choices import list_choices
from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.federation import federation
from knnper.cli.simulate import init, partition, simulate
from knnper.cli.site import site
from knnper.cli.store import store

app = typer.Typer(
    name="knnper",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
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


for _command in (init, simulate, sweep, compare, report, audit, partition):
    app.command()(_command)


app.command(name="list")(list_choices)


for _group in (federation, site, store):
    app.add_typer(_group)


def main() -> None:
    """Run the command on the command line."""
    # While torch is imported, garbage collection took a quarter second of a command.
    gc.set_threshold(10_000)
    app()
