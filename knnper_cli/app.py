"""The command ``knnper``."""

from typing import Annotated

import click
import typer

import knnper
from knnper_cli.batches import compare, moved, report, sweep
from knnper_cli.federation import federation
from knnper_cli.renamed import with_new_names
from knnper_cli.simulate import list_choices, partition, simulate
from knnper_cli.site import site
from knnper_cli.store import store
from knnper_cli.terminal import ErrorReportingGroup, say


class Root(ErrorReportingGroup):
    """Takes the names of the version before, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return what is left of the arguments for the command they name."""
        return super().parse_args(ctx, with_new_names(args, self.num_names, say))

    def num_names(self, words: list[str]) -> int:
        """Return how many of the first words name the command."""
        command: click.Command | None = self
        for place, word in enumerate(words):
            # Typer brings a copy of click's classes: told by what they hold.
            command = getattr(command, "commands", {}).get(word)
            if command is None:
                return place
        return len(words)


app = typer.Typer(
    name="knnper",
    cls=Root,
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


for _command in (simulate, sweep, compare, report, partition):
    app.command()(_command)
app.command(name="list")(list_choices)
for _name in ("reproduce", "figure"):
    app.command(
        _name,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(moved)
for _group in (federation, site, store):
    app.add_typer(_group)


def main() -> None:
    """Run the command that was typed."""
    app()
