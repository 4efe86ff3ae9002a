"""Stores that end with the process: for simulations of thousands of clients."""

from torch import Tensor

from datastore.core.cache import NoCache
from datastore.core.live_view import LiveView
from datastore.core.memory_rows import MemoryRows
from datastore.core.rows import Version
from datastore.examples import NewExamples, StoreSpec
from datastore.settings import StoreSettings, require_settings
from datastore.store import Store
from datastore.validation import require_embeddings

UNNAMED = "unnamed"
"""Fingerprint of a model that nobody asks about: the store ends before the model."""


def memory_store(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: StoreSettings | None = None,
) -> Store:
    """Return a store in memory that holds these examples, as far as its policy keeps.

    Parameters
    ----------
    embeddings
        float32, shape (n, p).
    labels
        int64, shape (n,), in [0, c).
    num_classes
        c.
    settings
        Policy, capacity and index; by default all examples are kept and searched
        exactly.

    Raises
    ------
    DataError
        If an embedding is not finite, a label is out of range, or lengths differ.
    """
    require_embeddings("embeddings to store", embeddings)
    store = empty_memory_store(
        StoreSpec(num_classes), int(embeddings.shape[1]), UNNAMED, settings
    )
    store.add(NewExamples(embeddings, labels))
    return store


def empty_memory_store(
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings | None = None,
) -> Store:
    """Return an empty store in memory; see `datastore.folder.create_store`."""
    settings = settings or StoreSettings()
    require_settings(settings, spec, embedding_dim)
    rows = MemoryRows(Version(1, fingerprint, embedding_dim), spec.num_classes)
    live = LiveView(rows, NoCache(), settings.index)
    return Store(rows, live, spec, settings)
