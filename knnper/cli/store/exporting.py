"""``knnper store export``: a store's examples as one file."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.output import say
from knnper.cli.store.options import StoreFolder, counted

Target = Annotated[Path, typer.Argument(metavar="OUT.npz", help="The file to write.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file if it is there.")
]


def export(folder: StoreFolder, target: Target, overwrite: Overwrite = False) -> None:
    """Write all examples with their embeddings to one file."""
    if target.suffix != ".npz":
        raise typer.BadParameter(f"{target}: expected a file that ends in .npz")
    from datastore.care.exporting import export_store

    number = export_store(folder, target, overwrite=overwrite)
    say(f"{counted(number, 'example')} of {folder} written to {target}")
