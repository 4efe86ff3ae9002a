"""A later model, or more data: prepared beside what is served, then put in its place.

Preparing only reads the store, so that it needs no right to write to it. Whoever may
write, which is the service where it runs, then settles what is prepared.
"""

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from client.residence.building import embedded, keep_model, store_spec
from client.residence.decision import Decided, Filled, decide
from client.residence.errors import ResidenceError
from client.residence.offered import Offered
from client.residence.pending import (
    Pending,
    pending_serving,
    remove_pending,
    write_pending,
)
from client.residence.places import Places
from client.residence.serving import Serving, read_serving, write_serving
from datastore.errors import ExamplesMissingError, NotErasedError
from datastore.examples import NewExamples, Selection
from datastore.folder import open_store, read_identity
from datastore.memory import empty_memory_store
from datastore.store import Store
from datastore.store_reader import StoreReader
from knnper.data.examples import Examples
from knnper.data.site.site_data import NamedExamples, SiteData
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.memory import remember

AT_ONCE = 256
"""Examples that are embedded, and made durable, together."""

ATTEMPTS = 10
"""To read a store from which others delete."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Whole:
    """What the store will hold, as splits, what of it is new, and what leaves it."""

    train: Examples
    validation: Examples
    new: NamedExamples
    moved: tuple[str, ...]


def prepare(
    places: Places, model: GlobalModel, data: SiteData, *, took_part: bool
) -> Decided:
    """Write down what is to be served next; return it.

    λ, k and σ are chosen on all that the store will hold: what it holds, and what is
    new in the data by name. What was once deleted from it stays away, and what is in
    the test split by now leaves it: else each would be found beside itself.

    Parameters
    ----------
    places
        The client's state folder, with a store.
    model, data, took_part
        See `decide`.

    Raises
    ------
    ResidenceError
        If the store was made for other inputs or classes.
    """
    _require_same_task(places, model)
    with open_store(places.store) as store:
        whole = _whole(store, Offered(places), data)
        settings = store.settings
    memory = empty_memory_store(
        store_spec(model), model.embedding_dim, model.fingerprint, settings
    )
    train, validation = (
        NewExamples(model.embed(one.images), one.labels, one.images)
        for one in (whole.train, whole.validation)
    )
    tuned = remember(memory, train, validation, model.head, model.card.memory)
    filled = Filled(memory, tuned, len(train))
    decided = decide(model, filled, data, took_part=took_part)
    with places.committing():
        keep_model(places, model)
        write_pending(places, Pending(decided.serving, whole.new, whole.moved))
    return decided


def settle(places: Places, store: Store, pending: Pending, model: GlobalModel) -> None:
    """Bring the store to what is prepared, and serve that from then on.

    Searches go on meanwhile. Whatever a kill cuts short is made up for by the next
    call: until the store is embedded anew the former model is served, then this one.

    Parameters
    ----------
    places
        The client's state folder.
    store
        Its store.
    pending
        What is prepared.
    model
        Its model.
    """
    offered = Offered(places)
    if pending.moved:
        _delete(store, pending.moved)
        offered.withdraw(pending.moved)
    store.reembed(model.embed, model.fingerprint)
    _add_new(store, pending.new, model)
    offered.add(pending.new.names)
    with places.committing():
        before = _served_before(read_serving(places.serving), model)
        write_serving(places.serving, replace(pending.serving, previous=before))
        if pending_serving(places) == pending.serving:
            remove_pending(places)
        _remove_models(places)


def _served_before(now: Serving | None, model: GlobalModel) -> str | None:
    if now is None:
        return None
    return now.previous if now.model == model.fingerprint else now.model


def _require_same_task(places: Places, model: GlobalModel) -> None:
    found, expected = store_spec(model), read_identity(places.store).spec
    if found == expected:
        return
    shapes = [
        None if one.input is None else one.input.shape for one in (found, expected)
    ]
    raise ResidenceError(
        f"the model takes inputs of shape {shapes[0]} of the classes "
        f"{', '.join(found.class_names)}; expected those of {places.store}: shape "
        f"{shapes[1]}, classes {', '.join(expected.class_names)}. Give the client "
        "another `state` folder for another task"
    )


def _whole(store: StoreReader, offered: Offered, data: SiteData) -> _Whole:
    stored, names = _stored(store)
    known, in_test = set(names), set(data.test.names)
    is_held_out, is_tested = _in(names, data.validation.names), _in(names, in_test)
    train, validation = (
        _without(split, known, offered) for split in (data.train, data.validation)
    )
    return _Whole(
        train=_rows(stored, ~is_held_out & ~is_tested).join(train.examples),
        validation=_rows(stored, is_held_out).join(validation.examples),
        new=NamedExamples(
            train.examples.join(validation.examples), train.names + validation.names
        ),
        moved=tuple(name for name in names if name is not None and name in in_test),
    )


def _in(names: Sequence[str | None], split: Iterable[str]) -> torch.Tensor:
    """Return which names are a split's, bool of shape (n,)."""
    wanted = set(split)
    return torch.tensor([name in wanted for name in names], dtype=torch.bool)


def _stored(store: StoreReader) -> tuple[Examples, list[str | None]]:
    """Return what is stored, and the owner's names, in the order of the ids."""
    for _ in range(ATTEMPTS - 1):
        try:
            return _read(store)
        except ExamplesMissingError as error:
            # Whoever serves has deleted some of them in between.
            _LOG.info("read again: %s", error)
    return _read(store)


def _read(store: StoreReader) -> tuple[Examples, list[str | None]]:
    contents = store.contents()
    names = store.external_ids(contents.ids)
    images = store.inputs(contents.ids)
    return Examples(images, torch.from_numpy(contents.labels)), names


def _rows(examples: Examples, chosen: torch.Tensor) -> Examples:
    return examples.take(chosen.nonzero()[:, 0])


def _without(
    split: NamedExamples, known: set[str | None], offered: Offered
) -> NamedExamples:
    """Return the examples that are new to the store."""
    places = [
        place
        for place, name in enumerate(split.names)
        if name not in known and name not in offered
    ]
    return _taken(split, places)


def _taken(split: NamedExamples, places: list[int]) -> NamedExamples:
    examples = split.examples.take(torch.tensor(places, dtype=torch.int64))
    return NamedExamples(examples, tuple(split.names[place] for place in places))


def _delete(store: Store, names: tuple[str, ...]) -> None:
    try:
        store.delete(Selection(external_ids=names))
    except NotErasedError as error:
        # They are found no longer; the store makes up for the rest by itself.
        _LOG.warning("%s", error)


def _add_new(store: Store, new: NamedExamples, model: GlobalModel) -> None:
    # Some may have been added before a kill, or by name meanwhile.
    known = set(store.external_ids(store.select(Selection(external_ids=new.names))))
    places = [place for place, name in enumerate(new.names) if name not in known]
    for start in range(0, len(places), AT_ONCE):
        part = _taken(new, places[start : start + AT_ONCE])
        store.add(embedded(model, part), model.fingerprint)


def _remove_models(places: Places) -> None:
    """Remove the model folders that nothing names."""
    named = set[str | None]()
    for serving in (read_serving(places.serving), pending_serving(places)):
        if serving is not None:
            named |= {serving.model, serving.previous}
    for folder in places.models.iterdir():
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)
