"""What can go wrong with a store."""

from collections.abc import Sequence
from pathlib import Path

from knnper.config.errors import KnnPerError

SHOWN = 10
"""So many ids of what is wrong are named."""


class StoreError(KnnPerError):
    """A store cannot do what it was asked; it holds what it held before.

    The one exception is `NotErasedError`.
    """


class StoreFullError(StoreError):
    """An example does not fit: capacity, budget or the disk is exhausted."""


class StoreBusyError(StoreError):
    """Another process writes to the store."""


class NotErasedError(StoreError):
    """Examples are deleted, but their bytes may still be in a file."""


class StoreMismatchError(StoreError):
    """The store was embedded by another model."""


class StoreDamagedError(StoreError):
    """The store's files are not what was written.

    Attributes
    ----------
    found
        What is wrong, without how to mend it; empty where the text alone says it.
    """

    found: str = ""


class ExamplesMissingError(StoreDamagedError):
    """Examples that were asked for are not there, or no longer."""


def named(ids: Sequence[object]) -> str:
    """Return the first ids as text."""
    more = ", ..." if len(ids) > SHOWN else ""
    return ", ".join(map(str, ids[:SHOWN])) + more


def to_restore(folder: Path) -> str:
    """Return how to mend what is damaged beyond single examples."""
    return (
        "restore the whole folder from a backup, or save what is intact: knnper store "
        f"salvage {folder} NEW_FOLDER"
    )


def to_delete(folder: Path, ids: Sequence[object]) -> str:
    """Return how to mend a store of which these examples are damaged."""
    options = " ".join(f"--id {one}" for one in ids[:SHOWN])
    more = " and so on" if len(ids) > SHOWN else ""
    return (
        "restore the folder from a backup, or delete them: knnper store delete "
        f"{folder} {options}{more}"
    )
