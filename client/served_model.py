"""The model that a client serves, while its store and the model itself change."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from knnper.client.install import settle, store_spec
from knnper.client.site_state import SiteState
from knnper.client.state import (
    Serving,
    SiteStateError,
    pending_serving,
    read_pending,
)
from knnper.data.examples import blank_input
from knnper.datastore.examples import (
    Added,
    Ids,
    NewExamples,
    Selection,
    StoreMismatchError,
)
from knnper.datastore.prediction import (
    KnnPredictor,
    NeighborClassifier,
    Prediction,
)
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.datastore.private_memory import PrivateMemory, PrivatePrediction
from knnper.datastore.store import Store, create_store, open_store
from knnper.strategies.core.exported_model import GlobalModel

ATTEMPTS = 5  # of one request while models change: more than there ever are
_LOG = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True)
class ModelInUse:
    """A model, how it is served, and the predictor of both, built once."""

    model: GlobalModel
    serving: Serving
    predictor: KnnPredictor
    private: PrivateMemory | None = None  # answers in place of the predictor


class ServedModel(contextlib.AbstractContextManager["ServedModel"]):
    """The model that a client serves, and its memory; any number of threads use it.

    The store's fingerprint decides which model is served: every answer comes from one
    model, from a store that this model has embedded, and from the λ of both.

    Attributes
    ----------
    privacy
        Settings of private answers; None answers without noise.
    """

    def __init__(
        self,
        site_state: SiteState,
        store: Store,
        privacy: PrivateAnswerSettings | None = None,
    ) -> None:
        self.store = store
        self.privacy = privacy
        self._site_state = site_state
        self._refreshing = threading.Lock()
        self._in_use: dict[str, ModelInUse] = {}  # by fingerprint
        self._load_in_use()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> GlobalModel:
        """The global model that is served now."""
        return self._current().model

    @property
    def serving(self) -> Serving:
        """The hyper-parameters and figures of the model that is served now."""
        return self._current().serving

    @property
    def private_memory(self) -> PrivateMemory | None:
        """The memory that answers privately; None without `privacy`."""
        return self._current().private

    def predict(self, images: Tensor) -> Prediction:
        """Predict n inputs of shape (n, height, width, channels), without noise."""
        assert self.privacy is None, "private answers come from predict_privately"
        return self._retry_on_change(lambda used: used.predictor.explain(images))

    def predict_privately(self, images: Tensor) -> PrivatePrediction:
        """Predict n inputs with noise; the charges are on disk when this returns."""

        def predict(used: ModelInUse) -> PrivatePrediction:
            assert used.private is not None, "only a service with `privacy` calls this"
            embeddings = used.model.embed(images)
            return used.private.predict(embeddings, used.model.head(embeddings))

        return self._retry_on_change(predict)

    def try_out(self, images: Tensor) -> None:
        """Predict n inputs, but ask no private memory, which would charge for it."""
        if self.privacy is None:
            self.predict(images)
        else:
            used = self._current()
            used.model.head(used.model.embed(images))

    def add(
        self, images: Tensor, labels: Tensor, names: Sequence[str | None] | None = None
    ) -> Added:
        """Embed and store n examples; they are on disk when this returns."""
        external_ids = None if names is None else tuple(names)

        def add(used: ModelInUse) -> Added:
            embeddings = used.model.embed(images)
            new = NewExamples(embeddings, labels, images, external_ids)
            return self.store.add(new, used.model.fingerprint)

        return self._retry_on_change(add)

    def delete(self, selection: Selection) -> Ids:
        """Delete examples without a trace, and return their ids."""
        return self.store.delete(selection)

    def refresh(self) -> bool:
        """Take up a newer installation; return whether what is served has changed."""
        with self._refreshing:
            before = self.serving
            folder = self._site_state.folder
            pending = read_pending(folder)
            if pending is not None:
                fingerprint = pending.serving.model
                model = self._load_model(fingerprint)
                # Put there before the store changes its model: requests look it up.
                used = self._use(model, pending.serving)
                self._in_use.setdefault(fingerprint, used)
                settle(folder, self.store, pending, model)
            self._load_in_use()
            return self.serving != before

    def close(self) -> None:
        """Close the store, so that other processes can write to it."""
        self.store.close()

    def _retry_on_change(self, request: Callable[[ModelInUse], R]) -> R:
        """Answer a request, again if the store is re-embedded while it is answered."""
        for _ in range(ATTEMPTS - 1):
            try:
                return request(self._current())
            except StoreMismatchError as error:
                _LOG.info("the model changed during a request; tried again: %s", error)
        return request(self._current())

    def _current(self) -> ModelInUse:
        used = self._in_use.get(self.store.fingerprint)
        # None if the store has changed its model twice since the last refresh.
        return self._load_in_use() if used is None else used

    def _load_in_use(self) -> ModelInUse:
        """Load the installed model by which the store is embedded."""
        folder = self._site_state.folder
        installed = (pending_serving(folder), self._site_state.served())
        by_model = {
            serving.model: serving for serving in installed if serving is not None
        }
        serving = by_model.get(self.store.fingerprint)
        if serving is None:
            raise SiteStateError(
                f"{folder.store} was embedded by the model "
                f"{self.store.fingerprint[:12]}, which was not installed; install a "
                "model again: knnper site onboard"
            )
        used = self._in_use.get(serving.model)
        # Once an installation is settled, its serving also names the previous model.
        if used is None or replace(used.serving, previous=serving.previous) != serving:
            used = self._use(self._load_model(serving.model), serving)
        self._in_use = {serving.model: used}
        return used

    def _use(self, model: GlobalModel, serving: Serving) -> ModelInUse:
        neighbors = NeighborClassifier(
            self.store,
            serving.num_neighbors,
            serving.kernel,
            serving.kernel_scale,
            model.fingerprint,
            with_names=True,
        )
        predictor = KnnPredictor(
            model.embed,
            model.head,
            neighbors,
            serving.knn_weight,
            serving.class_prior,
        )
        private = None
        if self.privacy is not None:
            private = PrivateMemory(self.store, self.privacy, model.fingerprint)
        return ModelInUse(model, serving, predictor, private)

    def _load_model(self, fingerprint: str) -> GlobalModel:
        used = self._in_use.get(fingerprint)
        if used is not None:
            return used.model
        model = self._site_state.load(fingerprint)
        # The first pass copies the weights into the network, which is not thread-safe.
        model.head(model.embed(blank_input(model.spec)))
        return model


def open_served(
    site_state: SiteState, privacy: PrivateAnswerSettings | None = None
) -> ServedModel:
    """Open what a client serves, and finish an interrupted change of its model."""
    serving = site_state.served()
    if serving is None:
        raise SiteStateError(
            f"nothing is installed in {site_state.folder.path} yet; wait for the "
            "federation's model, or run knnper site onboard"
        )
    folder = site_state.folder
    if site_state.has_store():
        store = open_store(folder.store, writable=True)
    else:
        # Its owner removed the memory: begin with an empty one.
        model = site_state.load(serving.model)
        store = create_store(
            folder.store,
            store_spec(model),
            model.embedding_dim,
            model.fingerprint,
            model.card.memory.store,
        )
    try:
        if store.fingerprint != serving.model:
            # The process was killed after the store had changed its model.
            pending = read_pending(folder)
            if pending is None:
                model = site_state.load(serving.model)
                store.reembed(model.embed, serving.model)
            else:
                model = site_state.load(pending.serving.model)
                settle(folder, store, pending, model)
        return ServedModel(site_state, store, privacy)
    except BaseException:
        store.close()
        raise
