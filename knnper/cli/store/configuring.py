"""``knnper store configure``: another policy, capacity or index."""

from typing import Annotated

import typer

from knnper.cli.output import print_json, say
from knnper.cli.store.options import StoreFolder
from knnper.cli.store.settings import as_document, store_settings

RequiredChanges = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="As in --set capacity=5000 or --set 'index={name: sq8, rerank: 4}'; may "
        "be repeated.",
    ),
]


def configure(folder: StoreFolder, changes: RequiredChanges) -> None:
    """Change a store's settings; another index is built at once."""
    from datastore.folder import configure_store, open_store, read_identity

    before = read_identity(folder).settings
    settings = store_settings(as_document(before), changes)
    configure_store(folder, settings)
    if settings.index != before.index:
        with open_store(folder, writable=True) as store:
            store.save()
    print_json(as_document(settings))
    say(f"{folder} has these settings from now on")
