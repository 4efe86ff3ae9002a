"""What the kinds of index share when they are made."""

from collections.abc import Mapping
from pathlib import Path

import faiss
import numpy as np

from datastore.errors import StoreDamagedError
from datastore.index.base import Vectors
from datastore.index.index_file import IndexFile

_LARGEST = 1e15


def learnable(vectors: Vectors) -> Vectors:
    """Return ``vectors`` with larger numbers cut to 1e15.

    Ranges, and distances between vectors in k-means, then do not overflow.
    """
    return np.clip(vectors, -_LARGEST, _LARGEST)


def require_layout(
    content: IndexFile,
    path: Path,
    dim: int,
    code_sizes: Mapping[type[faiss.Index], int],
) -> None:
    """Do nothing if the file holds what it should.

    Parameters
    ----------
    content
        What was read.
    path
        From where.
    dim
        p.
    code_sizes
        The types of FAISS that it may be, and bytes of a code of each.

    Raises
    ------
    StoreDamagedError
        If it holds an index of another kind or size, or has lost ids.
    """
    index = content.index
    # The lists of IVF hold the ids themselves.
    keeps_ids = isinstance(index, faiss.IndexIVF)
    num_slots = index.ntotal if keeps_ids else len(content.ids)
    found = (type(index).__name__, index.d, _code_size(index), index.ntotal)
    expected = [
        (type_.__name__, dim, size, num_slots) for type_, size in code_sizes.items()
    ]
    if found not in expected:
        raise StoreDamagedError(
            f"{path} holds another index than the settings say; build it anew from "
            "the vectors. Found type, size of an embedding, bytes of a code and number "
            f"{found}, expected {' or '.join(map(str, expected))}"
        )


def _code_size(index: faiss.Index) -> int:
    """Return the bytes in which ``index`` keeps a vector."""
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size)
    holder = index.storage if isinstance(index, faiss.IndexHNSW) else index
    return int(holder.sa_code_size())
