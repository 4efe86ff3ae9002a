"""The commands of ``knnper store``, together."""

import typer

from knnper.cli.store.adding import add
from knnper.cli.store.advising import advise
from knnper.cli.store.compacting import compact
from knnper.cli.store.configuring import configure
from knnper.cli.store.creating import create
from knnper.cli.store.deleting import delete
from knnper.cli.store.describing import info
from knnper.cli.store.exporting import export
from knnper.cli.store.reembedding import reembed
from knnper.cli.store.verifying import salvage, verify

store = typer.Typer(
    name="store",
    no_args_is_help=True,
    help="Keep, check and change a client's memory on disk.",
)

for _command in (
    create,
    add,
    info,
    verify,
    salvage,
    delete,
    export,
    configure,
    compact,
    reembed,
    advise,
):
    store.command()(_command)
