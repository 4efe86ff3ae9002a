"""Which kind of index suits a client, measured on its own examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from datastore.care.trials import AdviceSettings, Head, Part, Trial, Trials, all_kinds
from datastore.contents import Contents
from datastore.core.rows import Rows
from datastore.index.base import Vectors
from datastore.index.catalogue import IndexSettings
from datastore.index.flat import FlatSettings
from knnper.config.seeding import RandomKey

FEWEST = 10
"""Nothing can be measured with fewer examples."""

ASKED_SHARE, TUNED_SHARE = 0.2, 0.1
"""Parts of the examples that are looked up, and that λ is chosen on."""

MOST_ASKED = 1000
"""Enough to tell half a point of accuracy apart."""

TOLERANCE = 0.005
"""What an index may cost: half a point of accuracy."""

SMALL_BYTES = 16e6
"""A flat index of fewer bytes is not worth another."""


@dataclass(frozen=True)
class Advice:
    """What was measured, and what follows.

    Attributes
    ----------
    num_examples
        N, in the store.
    num_indexed, num_asked
        Of them, those in the indexes and those that were looked up.
    global_accuracy
        Of the global model alone; None without one.
    trials
        The flat index first; none where the examples are too few.
    recommended
        Title of a trial.
    reason
        Why.
    """

    num_examples: int
    num_indexed: int
    num_asked: int
    global_accuracy: float | None
    trials: tuple[Trial, ...]
    recommended: str
    reason: str


def advise(
    rows: Rows,
    num_classes: int,
    settings: AdviceSettings,
    head: Head | None = None,
    on_start: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Advice:
    """Measure every kind of index on a split of the stored examples.

    A fifth is looked up in an index of the others. With the global model, a tenth more
    is left out of the index, on which λ is chosen for each kind.

    Parameters
    ----------
    rows
        The examples.
    num_classes
        c.
    settings
        How the neighbours vote, and the seed of the split.
    head
        The global model that belongs to the embeddings; None leaves it out.
    on_start, on_progress
        Are told how many kinds there are, and how many more are done.
    """
    with rows.reading():
        contents, active = rows.contents(), rows.head().active
        if len(contents) < FEWEST:
            return _too_few(len(contents))
        vectors = rows.vectors(contents.ids, active.number)
        tuned_share = 0.0 if head is None else TUNED_SHARE
        stored, asked, tuned = _split(contents, vectors, tuned_share, settings.seed)
        trials = Trials(
            stored,
            asked,
            tuned,
            num_classes,
            settings,
            active,
            lambda ids: rows.vectors(ids, active.number),
            head,
        )
        kinds = list(all_kinds())
        on_start(len(kinds))
        measured = tuple(_measured(trials, kinds, on_progress))
    recommended, reason = recommend(measured, len(contents))
    return Advice(
        len(contents),
        len(stored),
        len(asked),
        trials.global_accuracy(),
        measured,
        recommended,
        reason,
    )


def recommend(trials: Sequence[Trial], num_examples: int) -> tuple[str, str]:
    """Return the title of the best of ``trials``, the flat index first, and why.

    It is the flat one where that is small for ``num_examples`` anyway, else the one
    with the fewest bytes that loses at most half a point of accuracy.
    """
    flat, *_ = trials
    flat_bytes = flat.example_bytes * num_examples
    if flat_bytes <= SMALL_BYTES:
        return flat.title, (
            f"an exact index of all {num_examples} examples takes "
            f"{flat_bytes / 1e6:.1f} MB only"
        )
    good = [one for one in trials if one.accuracy >= flat.accuracy - TOLERANCE]
    best = min(good, key=lambda one: (one.example_bytes, one.query_ms))
    share = 100 * best.example_bytes / flat.example_bytes
    return best.title, (
        f"the fewest bytes ({share:.0f} % of flat) within {100 * TOLERANCE:.1f} points "
        f"of its accuracy ({100 * best.accuracy:.1f} and {100 * flat.accuracy:.1f} %)"
    )


def _measured(
    trials: Trials,
    kinds: Sequence[tuple[str, IndexSettings]],
    on_progress: Callable[[int], None],
) -> Iterator[Trial]:
    nearest = trials.nearest(FlatSettings())
    for title, settings in kinds:
        yield trials.measure(title, settings, nearest)
        on_progress(1)


def _split(
    contents: Contents, vectors: Vectors, tuned_share: float, seed: int
) -> tuple[Part, Part, Part]:
    """Return what is in the indexes, what is looked up, and what λ is chosen on."""
    order = RandomKey(seed, ("advice",)).numpy().permutation(len(contents))
    rank = order.argsort()
    num_asked = min(MOST_ASKED, round(ASKED_SHARE * len(contents)))
    num_tuned = min(MOST_ASKED, round(tuned_share * len(contents)))
    asked = rank < num_asked
    tuned = ~asked & (rank < num_asked + num_tuned)
    stored = ~asked & ~tuned
    parts = (
        Part(contents.take(part), vectors[part]) for part in (stored, asked, tuned)
    )
    in_index, looked_up, left_out = parts
    return in_index, looked_up, left_out


def _too_few(num_examples: int) -> Advice:
    reason = (
        f"{num_examples} examples are stored; at least {FEWEST} are needed to measure "
        "anything, and an exact index of so few is small"
    )
    return Advice(num_examples, 0, 0, None, (), "flat", reason)
