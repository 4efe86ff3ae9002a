"""A model and its memory at a site, put in their place as a whole, and re-embedding."""

import contextlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from knnper.client.data_changes import DataChanges, all_new, find_changes, reading
from knnper.client.state import (
    Accuracy,
    Gain,
    MeasuredOn,
    Offered,
    Pending,
    Places,
    Serving,
    SiteStateError,
    TunedOn,
    claim,
    pending_serving,
    read_pending,
    read_serving,
    remove_pending,
    write_pending,
    write_serving,
)
from knnper.data.dividing import clean_names
from knnper.data.examples import Examples, InputSpec
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import (
    Added,
    Contents,
    Ids,
    InputLayout,
    NewExamples,
    NotErasedError,
    Selection,
    StoreBusyError,
    StoreMismatchError,
    StoreSpec,
)
from knnper.datastore.memory import (
    KnnSettings,
    Tuned,
    choose_on,
    evenly_spread,
    fill_and_tune,
    left_out_evidence,
    store_settings_of,
)
from knnper.datastore.policy import policies_through
from knnper.datastore.prediction import (
    KERNELS,
    KnnPredictor,
    Names,
    NeighborClassifier,
    Prediction,
    interpolate,
    neighbor_vote,
)
from knnper.datastore.store import (
    DATABASE,
    Store,
    StoreReader,
    create_store,
    empty_memory_store,
    open_store,
    read_identity,
)
from knnper.datastore.tuning import Evidence
from knnper.files import sync_to_disc
from knnper.own import CLOSED, Door
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import (
    GlobalModel,
    ModelError,
    load_model,
    read_model,
    require_fingerprint,
    save_model,
)
from knnper.strategies.core.task import score

R = TypeVar("R")

FEWEST = 10  # of fewer the interval of an accuracy would span 50 points
MOST = 2000  # the margin of so many is about a point; more only take longer
NUM_FOLDS = 10
NORMAL_95 = 1.96


def estimate(
    model: GlobalModel,
    store: StoreReader,
    positions: Tensor,
    settings: KnnSettings,
    measured_on: MeasuredOn,
) -> tuple[Accuracy, Gain]:
    """Return what to expect of a client's memory, by nested cross-validation."""
    # What predicts an example is chosen without it, by the other nine tenths. The model
    # should not have been trained on those at `positions`, int64 (m,).
    if len(positions) < FEWEST:
        return Accuracy(), Gain(num_examples=len(positions))
    most = max(settings.candidates().num_neighbors)
    # Evenly spread; the folds take every tenth: a site's files come sorted by class.
    chosen = positions[evenly_spread(len(positions), MOST)]
    prior = settings.class_prior
    evidence = left_out_evidence(store, chosen, model.head, most, prior)
    fold_of = torch.arange(len(evidence)) % NUM_FOLDS
    folds = [fold_of == fold for fold in range(NUM_FOLDS)]
    outcomes = torch.cat([_outcomes(evidence, fold, store, settings) for fold in folds])
    alone, knn, mixed = outcomes.double().mean(dim=0).tolist()
    accuracy = Accuracy(alone, knn, mixed, len(outcomes), measured_on)
    return accuracy, paired_gain(outcomes[:, 0], outcomes[:, 2])


def paired_gain(before: Tensor, after: Tensor) -> Gain:
    """Return by how much ``after`` is right more often than ``before``, bool (m,)."""
    count = len(before)
    won, lost = int((after & ~before).sum()), int((before & ~after).sum())
    # Half an example more in each cell of the table, which keeps small counts honest.
    total = count + 2
    variance = (won + lost + 1 - (won - lost) ** 2 / total) / total**2
    return Gain((won - lost) / count, NORMAL_95 * math.sqrt(variance), count)


def _outcomes(
    evidence: Evidence, fold: Tensor, store: StoreReader, settings: KnnSettings
) -> Tensor:
    """Return who is right in a fold, bool (m, 3): global model, neighbours, both."""
    choice = choose_on(evidence.take(~fold), len(store), settings)
    asked, count = evidence.take(fold), choice.num_neighbors
    queries, prior = asked.queries, choice.class_prior
    log_weights = KERNELS[settings.kernel](
        asked.squared_distances[:, :count],
        choice.kernel_scale,
        queries.embeddings.shape[1],
    )
    alone, labels = queries.probabilities, queries.labels
    knn = neighbor_vote(log_weights, asked.neighbor_labels[:, :count], alone.shape[1])
    served = queries if prior is None else queries.adapted(prior.sharpness)
    mixed = interpolate(knn, served.probabilities, choice.knn_weight)
    return torch.stack(
        [one.argmax(dim=1) == labels for one in (alone, knn, mixed)], dim=1
    )


@dataclass(frozen=True)
class Decided:
    """What is served, and the probabilities (n, c) of the test split."""

    serving: Serving
    mixed: Tensor
    global_model: Tensor
    chosen: Mapping[str, float]


def decide(
    model: GlobalModel,
    store: StoreReader,
    tuned: Tuned,
    num_train: int,
    data: SiteData,
    *,
    took_part: bool,
) -> Decided:
    """Return what is served: the choice, or the global model where that loses."""
    # The store's first `num_train` ids are of training examples; who `took_part` in
    # training is measured on the others alone. The test split is read here only.
    settings = model.card.memory
    accuracy, gain = Accuracy(), Gain()
    ids = torch.from_numpy(store.contents().ids)
    if len(ids) > 1:
        positions = torch.arange(len(ids))
        measured_on: MeasuredOn = "leave_one_out"
        if took_part:
            positions, measured_on = positions[ids > num_train], "validation"
        accuracy, gain = estimate(model, store, positions, settings, measured_on)
    if is_loss := gain.is_loss:
        alone = replace(tuned.choice, knn_weight=0.0, class_prior=None)
        tuned = replace(tuned, choice=alone)
    choice = tuned.choice
    if choice.knn_weight == 0 and choice.class_prior is None:
        accuracy = replace(accuracy, mixed=accuracy.global_model)
        gain = replace(gain, expected=0.0, margin=0.0)
    predictor = tuned.predictor(model.embed, model.head, store, settings)
    test = data.test.examples
    made = predictor.explain(test.images)
    votes = made.vote.probabilities
    if len(test) > 0:
        accuracy = Accuracy(
            score(made.global_probabilities, test.labels).accuracy,
            None if votes is None else score(votes, test.labels).accuracy,
            score(made.probabilities, test.labels).accuracy,
            len(test),
            "test",
        )
    serving = Serving(
        model=model.fingerprint,
        knn_weight=choice.knn_weight,
        num_neighbors=choice.num_neighbors,
        kernel=settings.kernel,
        kernel_scale=choice.kernel_scale,
        tuned_on=TunedOn(tuned.kind, len(tuned.evidence), is_loss),
        accuracy=accuracy,
        expected_gain=gain,
        num_train=len(data.train),
        num_validation=len(data.validation),
        num_test=len(data.test),
        run=model.card.name,
        installed=time.time(),
        class_prior=choice.class_prior,
        took_part=took_part,
    )
    return Decided(
        serving, made.probabilities, made.global_probabilities, predictor.describe()
    )


_LOG = logging.getLogger(__name__)


def build(
    places: Places, name: str, model: GlobalModel, data: SiteData, *, took_part: bool
) -> Decided:
    """Make a client's memory and what is served with it; return the latter."""
    draft = places.drafts / "store"
    key = RandomKey(model.card.seed).child("personalize", name)
    settings = store_settings_of(model.card.memory, key)
    with create_store(
        draft, store_spec(model), model.embedding_dim, model.fingerprint, settings
    ) as store:
        train, validation = (
            embedded(model, one) for one in (data.train, data.validation)
        )
        tuned = fill_and_tune(store, train, validation, model.head, model.card.memory)
        decided = decide(model, store, tuned, len(train), data, took_part=took_part)
    with places.committing():
        keep_model(places, model)
        draft.rename(places.store)
        sync_to_disc(places.folder)
        Offered(places).add(data.train.names + data.validation.names)
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


def store_spec(model: GlobalModel) -> StoreSpec:
    """Return what a memory for ``model`` holds: inputs too, for the next model."""
    spec = model.spec
    layout = InputLayout(spec.image_shape, spec.stored_dtype)
    return StoreSpec(spec.num_classes, layout, model.class_names)


def embedded(model: GlobalModel, named: NamedExamples) -> NewExamples:
    """Return examples as a store takes them."""
    images = named.examples.images
    return NewExamples(model.embed(images), named.examples.labels, images, named.names)


AT_ONCE = 256  # examples that are embedded, and made durable, together


def prepare(
    places: Places,
    model: GlobalModel,
    data: SiteData,
    *,
    took_part: bool,
    forget_vanished: bool = False,
) -> Decided:
    """Write down what is to be served next; return it.

    Deleted examples stay away. Examples that are in the test split by now leave the
    store, in which each would be its own neighbour. Changed examples are replaced.
    """
    _require_same_task(places, model)
    with open_store(places.store) as store:
        settings, offered = store.settings, Offered(places)
        plan = reading(lambda: _planned(store, model, offered, data, forget_vanished))
    memory = empty_memory_store(
        store_spec(model), model.embedding_dim, model.fingerprint, settings
    )
    tuned = fill_and_tune(
        memory, plan.train, plan.validation, model.head, model.card.memory
    )
    num_train = len(plan.train)
    decided = decide(model, memory, tuned, num_train, data, took_part=took_part)
    with places.committing():
        keep_model(places, model)
        write_pending(
            places, Pending(decided.serving, plan.new, plan.leaving, plan.embeddings)
        )
    return decided


def settle(places: Places, store: Store, pending: Pending, model: GlobalModel) -> None:
    """Bring the store to what is prepared, and serve that from then on."""
    # Whatever a kill cuts short is made up for by the next call.
    offered = Offered(places)
    if pending.moved:
        try:
            store.delete(Selection(external_ids=pending.moved))
        except NotErasedError as error:
            # They are found no longer; the store makes up for the rest by itself.
            _LOG.warning("%s", error)
        offered.withdraw(pending.moved)
    store.reembed(model.embed, model.fingerprint)
    new = pending.new
    # Some may have been added before a kill, or by name meanwhile.
    known = set(store.external_ids(store.select(Selection(external_ids=new.names))))
    missing = [at for at, name in enumerate(new.names) if name not in known]
    for start in range(0, len(missing), AT_ONCE):
        part = _arriving(model, pending, missing[start : start + AT_ONCE])
        store.add(part, model.fingerprint)
    offered.add(new.names)
    _serve(places, pending.serving)


def _arriving(model: GlobalModel, pending: Pending, chosen: list[int]) -> NewExamples:
    """Return a part of what is new as a store takes it."""
    part = _taken(pending.new, chosen)
    if pending.embeddings is None:  # of an earlier version
        return embedded(model, part)
    examples, vectors = part.examples, pending.embeddings[torch.tensor(chosen)]
    return NewExamples(vectors, examples.labels, examples.images, part.names)


def _serve(places: Places, serving: Serving) -> None:
    """Serve that from now on, and remove the models that nothing names."""
    with places.committing():
        previous, now = None, read_serving(places.serving)
        if now is not None:
            previous = now.previous if now.model == serving.model else now.model
        write_serving(places.serving, replace(serving, previous=previous))
        named = {serving.model, previous}
        pending = pending_serving(places)
        if pending == serving:
            remove_pending(places)
        elif pending is not None:
            named |= {pending.model, pending.previous}
        for folder in places.models.iterdir():
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)


def _require_same_task(places: Places, model: GlobalModel) -> None:
    found, expected = store_spec(model), read_identity(places.store).spec
    # Earlier versions kept the names of classes as they were written.
    specs = [
        replace(spec, class_names=clean_names(spec.class_names))
        for spec in (found, expected)
    ]
    if specs[0] == specs[1]:
        _require_same_features(places, model)
        return
    shapes = [
        None if one.input is None else one.input.shape for one in (found, expected)
    ]
    raise SiteStateError(
        f"the model takes inputs of shape {shapes[0]} of the classes "
        f"{', '.join(found.class_names)}; expected those of {places.store}: shape "
        f"{shapes[1]}, classes {', '.join(expected.class_names)}. Give the client "
        "another `state` folder for another task"
    )


def _require_same_features(places: Places, model: GlobalModel) -> None:
    """Refuse a model with other features than the stored inputs have."""
    serving = read_serving(places.serving)
    if serving is None:
        return
    try:
        stored = read_model(places.model(serving.model)).card.feature_names
    except ModelError:
        return  # It is damaged, and its description cannot be trusted.
    names = model.card.feature_names
    if names and stored and names != stored:
        raise SiteStateError(
            f"the model takes the features {', '.join(names)}; expected those of the "
            f"examples in {places.store}, in their order: {', '.join(stored)}. Give "
            "the client another `state` folder for another task"
        )


@dataclass(frozen=True)
class _Plan:
    """The future content of a store, by split, and the steps that lead to it."""

    train: NewExamples
    validation: NewExamples
    new: NamedExamples
    embeddings: Tensor  # of what is new
    leaving: tuple[str, ...]


def _planned(
    store: StoreReader,
    model: GlobalModel,
    offered: Offered,
    data: SiteData,
    forget_vanished: bool,
) -> _Plan:
    changes, contents = find_changes(store, offered, data), store.contents()
    names = store.external_ids(contents.ids)
    vanished = changes.vanished if forget_vanished else ()
    leaving = (*changes.tested, *changes.changed, *vanished)
    stays, is_held_out = (
        np.array([(name in group) is wanted for name in names], dtype=np.bool_)
        for group, wanted in (
            (frozenset(leaving), False),
            (frozenset(data.validation.names), True),
        )
    )
    arriving = frozenset((*changes.new, *changes.changed))
    new = [
        _taken(split, [at for at, name in enumerate(split.names) if name in arriving])
        for split in (data.train, data.validation)
    ]
    stored = [
        _stored(store, model, contents.take(stays & chosen))
        for chosen in (~is_held_out, is_held_out)
    ]
    arrived = [_embedded(model, part.examples) for part in new]
    all_new = new[0].examples.join(new[1].examples)
    return _Plan(
        train=_joined(stored[0], arrived[0]),
        validation=_joined(stored[1], arrived[1]),
        new=NamedExamples(all_new, new[0].names + new[1].names),
        embeddings=torch.cat([part.embeddings for part in arrived]),
        leaving=leaving,
    )


def _stored(store: StoreReader, model: GlobalModel, contents: Contents) -> NewExamples:
    """Return stored examples as ``model`` embeds them; its own work is not redone."""
    images = store.inputs(contents.ids)
    stored = Examples(images, torch.from_numpy(contents.labels))
    if store.fingerprint != model.fingerprint:
        return _embedded(model, stored)
    vectors = store.vectors(contents.ids)
    if store.fingerprint != model.fingerprint:  # by another process, in between
        return _embedded(model, stored)
    return NewExamples(vectors, stored.labels, images)


def _embedded(model: GlobalModel, examples: Examples) -> NewExamples:
    return NewExamples(model.embed(examples.images), examples.labels, examples.images)


def _joined(first: NewExamples, second: NewExamples) -> NewExamples:
    assert first.inputs is not None
    assert second.inputs is not None
    return NewExamples(
        torch.cat([first.embeddings, second.embeddings]),
        torch.cat([first.labels, second.labels]),
        torch.cat([first.inputs, second.inputs]),
    )


def _taken(split: NamedExamples, places: list[int]) -> NamedExamples:
    examples = split.examples.take(torch.tensor(places, dtype=torch.int64))
    return NamedExamples(examples, tuple(split.names[place] for place in places))


class SiteState:
    """One client's models, memory and what it serves."""

    def __init__(
        self,
        folder: Path,
        name: str,
        key_sha256: str | None = None,
        door: Door = CLOSED,  # through which models and policies get what is its own
        replaced: Collection[str] = (),  # fingerprints of the client's earlier keys
    ) -> None:
        self.name = name
        self.places = Places(folder)
        self._door = door
        policies_through(door)
        claim(self.places, name, key_sha256, replaced)

    def install(
        self,
        model: GlobalModel,
        data: SiteData,
        *,
        took_part: bool,
        forget_vanished: bool = False,
    ) -> Decided:
        """Remember ``data`` by ``model``, and serve that; return what is served.

        ``forget_vanished``: Delete examples that are no longer in the data.
        """
        # Where another process writes to the memory, as the service does, that process
        # finishes the work (`ServedModel.refresh`).
        _require_read_for(model, data)
        with self.places.installing():
            shutil.rmtree(self.places.drafts, ignore_errors=True)
            if not self.has_store():
                return build(self.places, self.name, model, data, took_part=took_part)
            decided = prepare(
                self.places,
                model,
                data,
                took_part=took_part,
                forget_vanished=forget_vanished,
            )
            self._finish()
        return decided

    def finish(self) -> None:
        """Finish an installation that was interrupted."""
        with self.places.installing():
            self._finish()

    def _finish(self) -> None:
        pending = read_pending(self.places)
        if pending is None:
            return
        try:
            with open_store(self.places.store, writable=True) as store:
                model = self.load(pending.serving.model)
                settle(self.places, store, pending, model)
        except StoreBusyError as error:
            _LOG.info("left to the process that serves: %s", error)

    def served(self) -> Serving | None:
        """Return what is served; None if nothing was installed yet."""
        return read_serving(self.places.serving)

    def load(self, fingerprint: str) -> GlobalModel:
        """Return a model that was installed."""
        folder = self.places.model(fingerprint)
        try:
            model = load_model(folder, self._door)
            require_fingerprint(model, fingerprint, str(folder))
        except ModelError as error:
            _LOG.error("%s", error)
            raise ModelError(
                f"the model {fingerprint[:12]} in {folder} is missing or was damaged; "
                "get it again: knnper site onboard"
            ) from error
        return model

    def has_store(self) -> bool:
        """Return whether there is a memory."""
        return (self.places.store / DATABASE).is_file()

    def changes(self, data: SiteData) -> DataChanges:
        """Return how ``data`` differs from what the memory was made of."""
        if not self.has_store():
            return all_new(data)
        with open_store(self.places.store) as store:
            return find_changes(store, Offered(self.places), data)


def _require_read_for(model: GlobalModel, data: SiteData) -> None:
    found, expected = data.task, model.card.learned
    if found.feature_names != expected.feature_names:
        raise SiteStateError(
            f"the data was read for the features {', '.join(found.feature_names)}; the "
            f"model is for {', '.join(expected.feature_names)}"
        )
    if (found.spec, found.class_names) != (expected.spec, expected.class_names):
        raise SiteStateError(
            f"the data was read for {found.spec} and the classes "
            f"{', '.join(found.class_names)}; the model is for {expected.spec} and "
            f"the classes {', '.join(expected.class_names)}"
        )


def blank_input(spec: InputSpec) -> Tensor:
    """Return one input of zeros, with which a model can be tried."""
    return torch.zeros((1, *spec.image_shape), dtype=spec.torch_dtype)


MODEL_CHANGES = 4  # while one question is answered: more than there ever are
_State = tuple[GlobalModel, Serving]


class ServedModel(contextlib.AbstractContextManager["ServedModel"]):
    """What a client serves; any number of threads may use it at a time."""

    # The store says which model is served: an answer is of one model, of a store that
    # it has embedded, and of the λ that belongs to both.

    def __init__(self, site_state: SiteState, store: Store) -> None:
        self.store = store
        self._state_folder = site_state
        self._refreshing = threading.Lock()
        self._states: dict[str, _State] = {}
        self._names = Names(store)
        self._learn()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> GlobalModel:
        """The global model that is served now."""
        return self._state()[0]

    @property
    def serving(self) -> Serving:
        """How it is served now."""
        return self._state()[1]

    def predict(self, images: Tensor) -> Prediction:
        """Return the predictions for n inputs, shape (n, height, width, channels)."""

        def predict(model: GlobalModel, serving: Serving) -> Prediction:
            neighbors = NeighborClassifier(
                self.store,
                serving.num_neighbors,
                serving.kernel,
                serving.kernel_scale,
                model.fingerprint,
                self._names,
            )
            weight, prior = serving.knn_weight, serving.class_prior
            predictor = KnnPredictor(model.embed, model.head, neighbors, weight, prior)
            return predictor.explain(images)

        return self._consistently(predict)

    def add(
        self, images: Tensor, labels: Tensor, names: Sequence[str | None] | None = None
    ) -> Added:
        """Embed and store n examples; they are on disk when this returns."""
        named = None if names is None else tuple(names)

        def add(model: GlobalModel, _: Serving) -> Added:
            new = NewExamples(model.embed(images), labels, images, named)
            return self.store.add(new, model.fingerprint)

        return self._consistently(add)

    def delete(self, selection: Selection) -> Ids:
        """Delete examples, and every trace of them, and return their ids."""
        try:
            return self.store.delete(selection)
        finally:
            self._names.forget()

    def refresh(self) -> bool:
        """Serve what was installed meanwhile; return whether there was something."""
        with self._refreshing:
            before = self.serving
            pending = read_pending(self._state_folder.places)
            if pending is not None:
                fingerprint = pending.serving.model
                model = self._loaded(fingerprint)
                # Known before the store changes its model, to be there when it does.
                self._states.setdefault(fingerprint, (model, pending.serving))
                settle(self._state_folder.places, self.store, pending, model)
                self._names.forget()
            self._learn()
            return self.serving != before

    def close(self) -> None:
        """Let others write to the store."""
        self.store.close()

    def _consistently(self, ask: Callable[[GlobalModel, Serving], R]) -> R:
        for _ in range(MODEL_CHANGES):
            try:
                return ask(*self._state())
            except StoreMismatchError as error:
                _LOG.info("asked again: %s", error)
        return ask(*self._state())

    def _state(self) -> _State:
        """Return what belongs to the model that the store is searched by."""
        state = self._states.get(self.store.fingerprint)
        # None if the store has changed its model twice meanwhile.
        return self._learn() if state is None else state

    def _learn(self) -> _State:
        """Serve what the state folder says, as far as it belongs to the store."""
        places = self._state_folder.places
        written = (pending_serving(places), self._state_folder.served())
        known = {one.model: one for one in written if one is not None}
        serving = known.get(self.store.fingerprint)
        if serving is None:
            model = f"the model {self.store.fingerprint[:12]}, which was not installed"
            mend = "install a model anew: knnper site onboard"
            raise SiteStateError(f"{places.store} was embedded by {model}; {mend}")
        state = self._loaded(serving.model), serving
        self._states = {serving.model: state}
        return state

    def _loaded(self, fingerprint: str) -> GlobalModel:
        state = self._states.get(fingerprint)
        if state is not None:
            return state[0]
        model = self._state_folder.load(fingerprint)
        # The first pass copies the weights into the model, which one thread must do.
        model.head(model.embed(blank_input(model.spec)))
        return model


def open_served(site_state: SiteState) -> ServedModel:
    """Return what a client serves, ready to answer."""
    serving = site_state.served()
    if serving is None:
        mend = "wait for the federation's model, or run knnper site onboard"
        folder = site_state.places.folder
        raise SiteStateError(f"nothing is installed in {folder} yet; {mend}")
    folder = site_state.places.store
    if site_state.has_store():
        store = open_store(folder, writable=True)
    else:
        # Its owner removed it: there is nothing that it should remember.
        model = site_state.load(serving.model)
        spec, settings = store_spec(model), model.card.memory.store
        dim = model.embedding_dim
        store = create_store(folder, spec, dim, model.fingerprint, settings)
    try:
        if store.fingerprint != serving.model:
            # A kill cut something short after the store had changed its model.
            pending = read_pending(site_state.places)
            model = site_state.load((pending.serving if pending else serving).model)
            if pending is None:
                store.reembed(model.embed, serving.model)
            else:
                settle(site_state.places, store, pending, model)
        return ServedModel(site_state, store)
    except BaseException:
        store.close()
        raise
