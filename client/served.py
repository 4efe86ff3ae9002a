"""A model and a memory that answer, while both of them change."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from knnper.client.install import Residence, create_empty, predictor_of, settle
from knnper.client.state import (
    ResidenceError,
    Serving,
    pending_serving,
    read_pending,
)
from knnper.data.examples import no_examples
from knnper.datastore.examples import (
    Added,
    Ids,
    NewExamples,
    Selection,
    StoreMismatchError,
)
from knnper.datastore.prediction import Names, Prediction
from knnper.datastore.store import Store, StoreReader, open_store
from knnper.strategies.core.exported_model import GlobalModel

R = TypeVar("R")

ATTEMPTS = 5
"""A store changes its model once in a while, so that the second attempt is the last."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _State:
    """A model, and how it is mixed with the store that it has embedded."""

    model: GlobalModel
    serving: Serving


class ServedModel:
    """What a client serves; any number of threads may use it at a time.

    The store says which model is served: an answer comes from one model, from a store
    that the same model has embedded, and from the λ that belongs to both.

    Parameters
    ----------
    residence
        The client's state folder.
    store
        Its store; a `Store` if examples are to be added.
    """

    def __init__(self, residence: Residence, store: StoreReader) -> None:
        self.store = store
        self._residence = residence
        self._refreshing = threading.Lock()
        self._states: dict[str, _State] = {}
        self._names = Names(store)
        self._learn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def model(self) -> GlobalModel:
        """The global model that is served now."""
        return self._state().model

    @property
    def serving(self) -> Serving:
        """How it is served now."""
        return self._state().serving

    def predict(self, images: Tensor) -> Prediction:
        """Return the predictions for n inputs, shape (n, height, width, channels).

        Raises
        ------
        DataError
            If an embedding is not finite.
        """
        return self._consistently(
            lambda state: predictor_of(
                state.model, self.store, state.serving, self._names
            ).explain(images)
        )

    def add(
        self, images: Tensor, labels: Tensor, names: Sequence[str | None] | None = None
    ) -> Added:
        """Embed and store n examples; they are on disk when this returns.

        Parameters
        ----------
        images
            Shape (n, height, width, channels).
        labels
            int64, shape (n,).
        names
            The owner's, unique in the store; None for one without.

        Raises
        ------
        DataError
            If they do not fit, or a name is taken.
        StoreFullError
            If there is no room.
        ResidenceError
            If the store is open to read only.
        """
        store = self._writable()
        named = None if names is None else tuple(names)

        def add(state: _State) -> Added:
            new = NewExamples(state.model.embed(images), labels, images, named)
            return store.add(new, state.model.fingerprint)

        return self._consistently(add)

    def delete(self, selection: Selection) -> Ids:
        """Delete examples, and every trace of them, and return their ids.

        Raises
        ------
        NotErasedError, ValueError
            See `Store.delete`.
        ResidenceError
            If the store is open to read only.
        """
        store = self._writable()
        try:
            return store.delete(selection)
        finally:
            self._names.forget()

    def refresh(self) -> bool:
        """Serve what was installed meanwhile; return whether there was something.

        It takes as long as embedding the store anew; predictions, and examples that
        arrive, go on meanwhile by the model from before.

        Raises
        ------
        KnnPerError
            If that cannot be done; what was served goes on being served.
        """
        with self._refreshing:
            before = self.serving
            pending = read_pending(self._residence.places)
            if pending is not None and isinstance(self.store, Store):
                fingerprint = pending.serving.model
                model = self._loaded(fingerprint)
                # Known before the store changes its model, to be there when it does.
                self._states.setdefault(fingerprint, _State(model, pending.serving))
                settle(self._residence.places, self.store, pending, model)
                self._names.forget()
            self._learn()
            return self.serving != before

    def close(self) -> None:
        """Let others write to the store."""
        self.store.close()

    def _consistently(self, ask: Callable[[_State], R]) -> R:
        for _ in range(ATTEMPTS - 1):
            try:
                return ask(self._state())
            except StoreMismatchError as error:
                _LOG.info("asked again: %s", error)
        return ask(self._state())

    def _state(self) -> _State:
        """Return what belongs to the model that the store is searched by."""
        state = self._states.get(self.store.fingerprint)
        # None if another process has embedded the store anew.
        return self._learn() if state is None else state

    def _learn(self) -> _State:
        """Take up what the state folder says, as far as it belongs to the store."""
        places = self._residence.places
        written = (pending_serving(places), self._residence.served())
        known = {one.model: one for one in written if one is not None}
        serving = known.get(self.store.fingerprint)
        if serving is None:
            raise ResidenceError(
                f"the store in {places.store} was embedded by the model "
                f"{self.store.fingerprint[:12]}, which was not installed; install a "
                "model anew: knnper site onboard"
            )
        state = _State(self._loaded(serving.model), serving)
        self._states = {serving.model: state}
        return state

    def _loaded(self, fingerprint: str) -> GlobalModel:
        state = self._states.get(fingerprint)
        if state is not None:
            return state.model
        model = self._residence.load(fingerprint)
        # The first pass copies the weights into the model, which one thread must do.
        nothing = no_examples(model.spec).images
        model.head(
            model.embed(torch.zeros((1, *nothing.shape[1:]), dtype=nothing.dtype))
        )
        return model

    def _writable(self) -> Store:
        if not isinstance(self.store, Store):
            raise ResidenceError(
                "the store is open to read only, so that nothing can be added or "
                "deleted; open it to write"
            )
        return self.store


def open_served(residence: Residence, *, writable: bool) -> ServedModel:
    """Return what a client serves, ready to answer.

    Parameters
    ----------
    residence
        The client's state folder.
    writable
        Whether examples are to be added, and newer models to be taken up: one process
        at a time can.

    Raises
    ------
    ResidenceError
        If nothing was installed yet.
    StoreBusyError
        If another process writes.
    """
    serving = residence.served()
    if serving is None:
        raise ResidenceError(
            f"nothing is installed in {residence.places.folder} yet; wait for the "
            "federation to hand its model over, or run knnper site onboard"
        )
    if not writable:
        return _served(residence, open_store(residence.places.store))
    if not residence.has_store():
        # Its owner removed it: there is nothing that it should remember.
        create_empty(residence.places, residence.load(serving.model))
    store = open_store(residence.places.store, writable=True)
    try:
        _finish(residence, store, serving)
    except BaseException:
        store.close()
        raise
    return _served(residence, store)


def _served(residence: Residence, store: StoreReader) -> ServedModel:
    try:
        return ServedModel(residence, store)
    except BaseException:
        store.close()
        raise


def _finish(residence: Residence, store: Store, serving: Serving) -> None:
    """Make up for what a kill cut short after the store had changed its model."""
    if store.fingerprint == serving.model:
        return
    pending = read_pending(residence.places)
    if pending is not None:
        model = residence.load(pending.serving.model)
        settle(residence.places, store, pending, model)
    else:
        store.reembed(residence.load(serving.model).embed, serving.model)
