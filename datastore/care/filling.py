"""Examples from a source into a store, some at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from datastore.care.sources import Source
from datastore.examples import NewExamples, Selection
from datastore.store import Store

AT_ONCE = 256
"""Examples that are embedded, and made durable, together."""


@dataclass(frozen=True)
class Filled:
    """What became of a source.

    Attributes
    ----------
    num_stored
        Examples that were stored.
    num_refused
        Those that the policy did not keep.
    num_evicted
        Those that made room.
    num_skipped
        Those whose external ids were stored before.
    """

    num_stored: int = 0
    num_refused: int = 0
    num_evicted: int = 0
    num_skipped: int = 0


def fill(
    store: Store,
    source: Source,
    embed: Callable[[Tensor], Tensor],
    fingerprint: str,
    on_start: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Filled:
    """Embed and store what is new in ``source``.

    Examples whose external ids are stored are passed over, so that a call that was
    cut short goes on when it is made again. What `on_progress` was told of is on disk.

    Parameters
    ----------
    store
        Open to write.
    source
        The examples.
    embed
        From uint8 images (m, height, width, channels) to float32 (m, p).
    fingerprint
        Of the model behind ``embed``.
    on_start
        Is told how many are to be embedded.
    on_progress
        Is told how many more were.

    Raises
    ------
    DataError, StoreError
        As `Store.add`, and of images that cannot be read.
    """
    new = _new_positions(store, source)
    on_start(len(new))
    filled = Filled(num_skipped=len(source.external_ids) - len(new))
    for start in range(0, len(new), AT_ONCE):
        part = new[start : start + AT_ONCE]
        added = store.add(_examples(store, source, part, embed), fingerprint)
        stored = int((added.ids >= 0).sum())
        filled = replace(
            filled,
            num_stored=filled.num_stored + stored,
            num_refused=filled.num_refused + len(part) - stored,
            num_evicted=filled.num_evicted + len(added.evicted),
        )
        on_progress(len(part))
    return filled


def _new_positions(store: Store, source: Source) -> list[int]:
    names = tuple(name for name in source.external_ids if name is not None)
    known = store.external_ids(store.select(Selection(external_ids=names)))
    stored = set(known) - {None}
    return [
        position
        for position, name in enumerate(source.external_ids)
        if name not in stored
    ]


def _examples(
    store: Store,
    source: Source,
    positions: list[int],
    embed: Callable[[Tensor], Tensor],
) -> NewExamples:
    images = source.images(positions)
    rows = torch.tensor(positions)
    return NewExamples(
        embeddings=embed(images),
        labels=source.labels[rows],
        inputs=images if store.spec.input is not None else None,
        external_ids=tuple(source.external_ids[one] for one in positions),
        arrivals=None if source.arrivals is None else source.arrivals[rows],
    )
