"""The command ``knnper``."""

import gc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import click
import typer

import knnper
from knnper.cli.batches import compare, moved, report, sweep
from knnper.cli.choices import list_choices
from knnper.cli.federation import federation
from knnper.cli.simulate import init, partition, simulate
from knnper.cli.site import site
from knnper.cli.store import store
from knnper.cli.terminal import ErrorReportingGroup, say

# Names of 0.1.0, which still work for one version.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "methods": "list methods",
        "datasets": "list data",
        "federation": "fed",
        "server": "fed server",
        "client": "fed client",
        "submit": "fed submit",
        "export": "fed export",
        "data check": "site check",
        "onboard": "site onboard",
        "serve": "site serve",
        "doctor": "site doctor",
        "token": "site token",
    }
)

# By the command's new name, or how it begins; an option that is an argument now, the
# first one, has no new name.
OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "fed client": {"--config": ""},
        "fed submit": {"--server": ""},
        "site": {"--config": ""},
        "store": {"--run": "--model"},
    }
)


def with_new_names(
    words: Sequence[str],
    num_names: Callable[[list[str]], int],
    notify: Callable[[str], None],
) -> list[str]:
    """Return what was typed behind ``knnper`` in the names of this version."""
    typed = list(words)
    for old, new in COMMANDS.items():
        names = old.split()
        if typed[: len(names)] == names:
            notify(f"`knnper {old}` is `knnper {new}` now; the old name goes soon")
            typed = [*new.split(), *typed[len(names) :]]
            break
    count = num_names(typed)
    command = " ".join(typed[:count])
    for beginning, options in OPTIONS.items():
        if f"{command} ".startswith(f"{beginning} "):
            for old, new in options.items():
                typed = _with_option(typed, count, old, new, notify)
    return typed


def _with_option(
    typed: list[str], count: int, old: str, new: str, notify: Callable[[str], None]
) -> list[str]:
    for place, word in enumerate(typed):
        option, equals, value = word.partition("=")
        if option != old or (not equals and place + 1 == len(typed)):
            continue
        rest = typed[place + 1 :] if equals else typed[place + 2 :]
        value = value if equals else typed[place + 1]
        if new:
            notify(f"{old} is {new} now; the old name goes soon")
            return [*typed[:place], new, value, *rest]
        notify(f"{old} {value} is the argument {value} now; the old name goes soon")
        return [*typed[:count], value, *typed[count:place], *rest]
    return typed


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


for _command in (init, simulate, sweep, compare, report, partition):
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
    # A quarter second of each command went into looking for garbage while it imports.
    gc.set_threshold(10_000)
    app()
