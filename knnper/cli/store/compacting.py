"""``knnper store compact``: what is free goes back to the disk."""

from pathlib import Path

from knnper.cli.output import say
from knnper.cli.store.options import StoreFolder, megabytes


def compact(folder: StoreFolder) -> None:
    """Write the database anew without gaps, and build and save the index anew."""
    from datastore.folder import open_store

    with open_store(folder, writable=True) as store:
        before = _num_bytes(folder)
        store.compact()
    after = _num_bytes(folder)
    say(f"{folder} took {megabytes(before)} and takes {megabytes(after)}")


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
