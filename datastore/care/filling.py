"""Examples from a source into a store, some at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datastore.care.sources import Source
from datastore.errors import StoreFullError
from datastore.examples import NewExamples, Selection
from datastore.store import Store

AT_ONCE = 256
"""Examples that are embedded, and made durable, together."""


@dataclass(frozen=True)
class Filled:
    """What became of a source, when all of it was offered.

    Attributes
    ----------
    num_offered
        Examples that were not stored before: those that are stored, and those that
        are not.
    num_stored
        Of them, those that are stored now.
    num_not_kept
        Of them, those that the policy refused, or evicted again.
    num_evicted
        Examples from before that made room.
    num_skipped
        Those whose external ids were stored before.
    num_ignored
        Files that are no images by their names.
    """

    num_offered: int
    num_stored: int
    num_not_kept: int
    num_evicted: int
    num_skipped: int
    num_ignored: int


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
    StoreFullError
        If the policy takes all or nothing, and there is no room for all.
    DataError, StoreError
        As `Store.add`, and of images that cannot be read.
    """
    new = _new_positions(store, source)
    _require_room(store, len(new))
    before, kept = len(store), set[int]()
    on_start(len(new))
    for start in range(0, len(new), AT_ONCE):
        part = new[start : start + AT_ONCE]
        added = store.add(_examples(store, source, part, embed), fingerprint)
        kept.update(added.ids[added.ids >= 0].tolist())
        kept.difference_update(added.evicted.tolist())
        on_progress(len(part))
    return Filled(
        num_offered=len(new),
        num_stored=len(kept),
        num_not_kept=len(new) - len(kept),
        num_evicted=before + len(kept) - len(store),
        num_skipped=len(source.external_ids) - len(new),
        num_ignored=source.num_ignored,
    )


def _require_room(store: Store, num_new: int) -> None:
    """Refuse what will not fit in the end, before a part of it is stored."""
    most, held = store.capacity, len(store)
    if store.settings.policy != "concatenate" or most is None:
        return
    if held + num_new > most:
        raise StoreFullError(
            f"the store holds {held} examples of at most {most}, and {num_new} are to "
            "be added: none was; raise the capacity (knnper store configure), delete "
            "examples, add fewer, or choose a policy that makes room, such as 'fifo'"
        )


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
