"""A client's first memory: made beside, then put in its place as a whole."""

import logging
import shutil

from client.residence.decision import Decided, Filled, decide
from client.residence.offered import Offered, names_of
from client.residence.places import Places
from client.residence.serving import write_serving
from datastore.examples import InputLayout, NewExamples, StoreSpec
from datastore.folder import create_store
from datastore.store import Store
from knnper.config.seeding import RandomKey
from knnper.data.site.site_data import NamedExamples, SiteData
from knnper.durable_files import sync_folder
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.files import save_model
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.memory import remember, store_settings_of

_LOG = logging.getLogger(__name__)


def build(
    places: Places, name: str, model: GlobalModel, data: SiteData, *, took_part: bool
) -> Decided:
    """Make a client's memory and what is served with it; return the latter.

    A kill leaves no memory, or one that the next installation goes on with.

    Parameters
    ----------
    places
        The client's state folder, without a store.
    name
        The client's: the simulation's client of that name has the same memory.
    model
        Embeds the examples.
    data
        The site's.
    took_part
        See `decide`.
    """
    draft = places.drafts / "store"
    key = RandomKey(model.card.seed).child("personalize", name)
    settings = store_settings_of(model.card.memory, key)
    with create_store(
        draft, store_spec(model), model.embedding_dim, model.fingerprint, settings
    ) as store:
        filled = _filled(store, model, data)
        decided = decide(model, filled, data, took_part=took_part)
    with places.committing():
        keep_model(places, model)
        draft.rename(places.store)
        sync_folder(places.folder)
        Offered(places).add(names_of(data.train, data.validation))
        write_serving(places.serving, decided.serving)
    places.drafts.rmdir()
    return decided


def keep_model(places: Places, model: GlobalModel) -> None:
    """Put a model in its folder, in place of one that was damaged there."""
    folder = places.model(model.fingerprint)
    try:
        save_model(folder, model)
    except ModelError as error:
        _LOG.warning("%s; replaced by the model that is at hand", error)
        shutil.rmtree(folder)
        save_model(folder, model)


def create_empty(places: Places, model: GlobalModel) -> None:
    """Create a memory of nothing, where there is none."""
    settings = model.card.memory.store
    spec = store_spec(model)
    create_store(
        places.store, spec, model.embedding_dim, model.fingerprint, settings
    ).close()


def store_spec(model: GlobalModel) -> StoreSpec:
    """Return what a memory for ``model`` holds: inputs too, for the next model."""
    spec = model.spec
    layout = InputLayout(spec.image_shape, spec.stored_dtype)
    return StoreSpec(spec.num_classes, layout, model.class_names)


def embedded(model: GlobalModel, named: NamedExamples) -> NewExamples:
    """Return examples as a store takes them."""
    images = named.examples.images
    return NewExamples(model.embed(images), named.examples.labels, images, named.names)


def _filled(store: Store, model: GlobalModel, data: SiteData) -> Filled:
    train, validation = (
        embedded(model, split) for split in (data.train, data.validation)
    )
    tuned = remember(store, train, validation, model.head, model.card.memory)
    return Filled(store, tuned, len(data.train))
