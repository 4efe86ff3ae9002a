"""What can go wrong with a store."""

from knnper.config.errors import KnnPerError


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
    """The store's files are not what was written."""


class ExamplesMissingError(StoreDamagedError):
    """Examples that were asked for are not there, or no longer."""
