"""A client's first memory: made beside, then put in its place as a whole."""

import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from knnper.client.state import (
    Accuracy,
    Gain,
    MeasuredOn,
    Offered,
    Pending,
    Places,
    ResidenceError,
    Serving,
    TunedOn,
    claim,
    names_of,
    pending_serving,
    read_pending,
    read_serving,
    remove_pending,
    write_pending,
    write_serving,
)
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import (
    ExamplesMissingError,
    InputLayout,
    NewExamples,
    NotErasedError,
    Selection,
    StoreBusyError,
    StoreSpec,
)
from knnper.datastore.prediction import (
    KERNELS,
    KnnPredictor,
    Names,
    NeighborClassifier,
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
from knnper.datastore.tuning import Choice, Evidence
from knnper.files import sync_folder
from knnper.seeding import RandomKey
from knnper.strategies.core.exported_model import (
    GlobalModel,
    ModelError,
    load_model,
    require_fingerprint,
    save_model,
)
from knnper.strategies.core.memory import (
    KnnSettings,
    Tuned,
    choose_on,
    left_out_evidence,
    remember,
    store_settings_of,
)
from knnper.strategies.core.predictors import Evaluation, score

FEWEST = 10
"""Fewer examples say nothing about an accuracy: its interval would span 50 points."""

MOST = 2000
"""The margin of so many is about a point; more only take longer."""

NUM_FOLDS = 10

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """What was measured on examples that the client knows.

    Attributes
    ----------
    accuracy
        Of the global model, of the neighbours and of both.
    gain
        Of both over the global model.
    """

    accuracy: Accuracy
    gain: Gain

    @property
    def is_loss(self) -> bool:
        """Whether mixing is worse than the global model beyond doubt."""
        gain = self.gain
        if gain.expected is None or gain.margin is None:
            return False
        return gain.expected + gain.margin < 0


UNKNOWN = Estimate(Accuracy(), Gain())


def estimate(
    model: GlobalModel,
    store: StoreReader,
    positions: Tensor,
    settings: KnnSettings,
    measured_on: MeasuredOn,
) -> Estimate:
    """Return what to expect of a client's memory, by nested cross-validation.

    Every example that is measured is looked up among all others that are stored, with
    what the other nine tenths of them choose: it has no part in what
    predicts it.

    Parameters
    ----------
    model
        Has embedded the store.
    store
        The client's memory.
    positions
        Of the examples to measure among the stored ones, int64 of shape (m,). The
        global model should not have been trained on them.
    settings
        How the client chooses.
    measured_on
        What they are.
    """
    if len(positions) < FEWEST:
        return Estimate(Accuracy(), Gain(num_examples=len(positions)))
    most = max(settings.candidates().num_neighbors)
    evidence = left_out_evidence(
        store, _spread(positions), model.head, most, settings.class_prior
    )
    outcomes = torch.cat(
        [_outcomes(evidence, fold, store, settings) for fold in _folds(len(evidence))]
    )
    alone, knn, mixed = outcomes.double().mean(dim=0).tolist()
    accuracy = Accuracy(alone, knn, mixed, len(outcomes), measured_on)
    return Estimate(accuracy, paired_gain(outcomes[:, 0], outcomes[:, 2]))


def paired_gain(before: Tensor, after: Tensor) -> Gain:
    """Return by how much ``after`` is right more often than ``before``.

    Parameters
    ----------
    before, after
        Whether each example was predicted rightly, bool of shape (m,).
    """
    count = len(before)
    won = int((after & ~before).sum())
    lost = int((before & ~after).sum())
    # Half an example more in each cell of the table, which keeps small counts honest.
    total, changed, surplus = count + 2, won + lost + 1, won - lost
    variance = (changed - surplus**2 / total) / total**2
    return Gain((won - lost) / count, NORMAL_95 * math.sqrt(variance), count)


def _spread(positions: Tensor) -> Tensor:
    """Return at most `MOST` of the positions, evenly spread."""
    chosen = torch.linspace(0, len(positions) - 1, min(len(positions), MOST))
    return positions[chosen.round().long()]


def _folds(num_examples: int) -> Iterator[Tensor]:
    """Yield which examples are in each fold, bool of shape (m,)."""
    # Every tenth: a site's files come sorted by class.
    fold_of = torch.arange(num_examples) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        yield fold_of == fold


def _outcomes(
    evidence: Evidence, fold: Tensor, store: StoreReader, settings: KnnSettings
) -> Tensor:
    """Return who is right in a fold, bool (m, 3): global model, neighbours, both."""
    choice = choose_on(evidence.take(~fold), len(store), settings)
    asked = evidence.take(fold)
    alone, labels = asked.queries.probabilities, asked.queries.labels
    knn = _votes(asked, choice, settings)
    prior = choice.class_prior
    served = asked.queries if prior is None else asked.queries.adapted(prior.sharpness)
    mixed = interpolate(knn, served.probabilities, choice.knn_weight)
    return torch.stack(
        [one.argmax(dim=1) == labels for one in (alone, knn, mixed)], dim=1
    )


def _votes(evidence: Evidence, choice: Choice, settings: KnnSettings) -> Tensor:
    count, embeddings = choice.num_neighbors, evidence.queries.embeddings
    log_weights = KERNELS[settings.kernel](
        evidence.squared_distances[:, :count],
        choice.kernel_scale,
        embeddings.shape[1],
    )
    labels = evidence.neighbor_labels[:, :count]
    return neighbor_vote(log_weights, labels, evidence.queries.probabilities.shape[1])


@dataclass(frozen=True)
class Tested:
    """How a client's predictions do.

    Attributes
    ----------
    mixed, global_model
        What is served, and the global model alone.
    knn
        The neighbours alone; None where the store is empty.
    """

    mixed: Evaluation
    global_model: Evaluation
    knn: Evaluation | None

    def accuracy(self) -> Accuracy:
        """Return the shares that are right; the split must not be empty."""
        return Accuracy(
            global_model=self.global_model.accuracy,
            knn=None if self.knn is None else self.knn.accuracy,
            mixed=self.mixed.accuracy,
            num_examples=self.mixed.num_examples,
            measured_on="test",
        )


def tested(predictor: KnnPredictor, test: Examples) -> Tested:
    """Return how a client does on its test split, of which each input is read once."""
    made = predictor.explain(test.images)
    votes = made.vote.probabilities
    return Tested(
        mixed=score(made.probabilities, test.labels),
        global_model=score(made.global_probabilities, test.labels),
        knn=None if votes is None else score(votes, test.labels),
    )


@dataclass(frozen=True)
class Filled:
    """A memory that holds a client's examples, and what was chosen on them.

    Attributes
    ----------
    store
        The memory.
    tuned
        λ, k, σ and the class prior.
    num_train
        Training examples that were offered to it, before those of the validation
        split; ids are given in that order.
    """

    store: StoreReader
    tuned: Tuned
    num_train: int


@dataclass(frozen=True)
class Decided:
    """What is served, and how it does.

    Attributes
    ----------
    serving
        What is served.
    tested
        How that does on the test split.
    chosen
        What it comes from, as the predictor of the same memory describes itself.
    """

    serving: Serving
    tested: Tested
    chosen: Mapping[str, float]


def decide(
    model: GlobalModel,
    filled: Filled,
    data: SiteData,
    *,
    took_part: bool,
) -> Decided:
    """Return what is served: the choice, or the global model where that loses.

    Parameters
    ----------
    model
        Has embedded the memory.
    filled
        The memory.
    data
        The site's; its test split is read here, last, and nowhere else.
    took_part
        Whether the model may have been trained on the training split: then only the
        validation split says what to expect.
    """
    measured = _measured(model, filled, took_part)
    if measured.is_loss:
        filled = replace(filled, tuned=_overruled(filled.tuned))
    serving = _serving(model, filled.tuned, data)
    tuned_on = replace(serving.tuned_on, overruled=measured.is_loss)
    serving = replace(
        serving,
        tuned_on=tuned_on,
        accuracy=measured.accuracy,
        expected_gain=measured.gain,
    )
    if not filled.tuned.choice.uses_memory:
        serving = _without_memory(serving)
    predictor = filled.tuned.predictor(
        model.embed, model.head, filled.store, model.card.memory
    )
    found = tested(predictor, data.test.examples)
    if len(data.test) > 0:
        serving = replace(serving, accuracy=found.accuracy())
    return Decided(serving, found, predictor.describe())


def _overruled(tuned: Tuned) -> Tuned:
    """Return what serves the global model alone."""
    alone = replace(tuned.choice, knn_weight=0.0, class_prior=None)
    return replace(tuned, choice=alone)


def _measured(model: GlobalModel, filled: Filled, took_part: bool) -> Estimate:
    ids = torch.from_numpy(filled.store.contents().ids)
    measured_on: MeasuredOn = "validation" if took_part else "leave_one_out"
    positions = torch.arange(len(ids))
    if took_part:
        positions = positions[ids > filled.num_train]
    if len(ids) < 2:
        return UNKNOWN
    settings = model.card.memory
    return estimate(model, filled.store, positions, settings, measured_on)


def predictor_of(
    model: GlobalModel, store: StoreReader, serving: Serving, names: Names
) -> KnnPredictor:
    """Return what is served of a model and a store that it has embedded."""
    neighbors = NeighborClassifier(
        store,
        serving.num_neighbors,
        serving.kernel,
        serving.kernel_scale,
        model.fingerprint,
        names,
    )
    return KnnPredictor(
        model.embed, model.head, neighbors, serving.knn_weight, serving.class_prior
    )


def _serving(model: GlobalModel, tuned: Tuned, data: SiteData) -> Serving:
    return Serving(
        model=model.fingerprint,
        knn_weight=tuned.choice.knn_weight,
        num_neighbors=tuned.choice.num_neighbors,
        kernel=model.card.memory.kernel,
        kernel_scale=tuned.choice.kernel_scale,
        tuned_on=TunedOn(tuned.kind, len(tuned.evidence)),
        accuracy=Accuracy(),
        expected_gain=Gain(),
        num_train=len(data.train),
        num_validation=len(data.validation),
        num_test=len(data.test),
        run=model.card.name,
        installed=time.time(),
        class_prior=tuned.choice.class_prior,
    )


def _without_memory(serving: Serving) -> Serving:
    """Return what is known of a client that serves the global model alone."""
    accuracy = serving.accuracy
    return replace(
        serving,
        accuracy=replace(accuracy, mixed=accuracy.global_model),
        expected_gain=replace(serving.expected_gain, expected=0.0, margin=0.0),
    )


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


AT_ONCE = 256
"""Examples that are embedded, and made durable, together."""

RENEWAL_ATTEMPTS = 10
"""To read a store from which others delete."""


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
    for _ in range(RENEWAL_ATTEMPTS - 1):
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


class Residence:
    """One client's models, memory and what it serves.

    Parameters
    ----------
    folder
        The client's state folder; created if it is missing.
    name
        The client's.
    key_sha256
        Of its public key, in hexadecimal; None where none is used.

    Raises
    ------
    ResidenceError
        If the folder is another client's.
    """

    def __init__(self, folder: Path, name: str, key_sha256: str | None = None) -> None:
        self.name = name
        self.places = Places(folder)
        claim(self.places, name, key_sha256)

    def install(
        self, model: GlobalModel, data: SiteData, *, took_part: bool
    ) -> Serving:
        """Remember ``data`` by ``model``, and serve that; return what is served.

        See `install_and_test`.
        """
        return self.install_and_test(model, data, took_part=took_part).serving

    def install_and_test(
        self, model: GlobalModel, data: SiteData, *, took_part: bool
    ) -> Decided:
        """As `install`; return also how what is served does on the test split.

        The memory keeps what it has, embedded anew; what is new in the data by name is
        added. Where another process writes to the memory, as the service does, that
        process finishes the work (`ServedModel.refresh`). A kill at any point leaves
        what was served, or what is to be.

        Parameters
        ----------
        model
            The global model.
        data
            The site's examples, read for that model.
        took_part
            Whether the model may have been trained on the site's training split.

        Raises
        ------
        ResidenceError
            If data, model and memory are not for the same inputs and classes.
        StoreFullError
            If the memory takes all or nothing, and there is no room for all.
        """
        _residence_require_same_task(model, data)
        with self.places.installing():
            shutil.rmtree(self.places.drafts, ignore_errors=True)
            if not self.has_store():
                return build(self.places, self.name, model, data, took_part=took_part)
            decided = prepare(self.places, model, data, took_part=took_part)
            self._settle_unless_busy(model)
        return decided

    def served(self) -> Serving | None:
        """Return what is served; None if nothing was installed yet.

        Raises
        ------
        ResidenceError
            If the file that says so is damaged.
        """
        return read_serving(self.places.serving)

    def load(self, fingerprint: str) -> GlobalModel:
        """Return a model that was installed.

        Raises
        ------
        ModelError
            If it is missing or damaged.
        """
        folder = self.places.model(fingerprint)
        try:
            model = load_model(folder)
            require_fingerprint(model, fingerprint, str(folder))
        except ModelError as error:
            _LOG.error("%s", error)
            raise ModelError(
                f"the model {fingerprint[:12]} in {folder} is missing or was damaged; "
                "get it again: knnper site onboard, with --model FOLDER for an "
                "exported one"
            ) from error
        return model

    def has_store(self) -> bool:
        """Return whether there is a memory."""
        return (self.places.store / DATABASE).is_file()

    def _settle_unless_busy(self, model: GlobalModel) -> None:
        pending = read_pending(self.places)
        if pending is None:
            return
        try:
            with open_store(self.places.store, writable=True) as store:
                settle(self.places, store, pending, model)
        except StoreBusyError as error:
            _LOG.info("left to the process that serves: %s", error)


def _residence_require_same_task(model: GlobalModel, data: SiteData) -> None:
    found, expected = data.task, model.card.learned
    if (found.spec, found.class_names) != (expected.spec, expected.class_names):
        raise ResidenceError(
            f"the data was read for {found.spec} and the classes "
            f"{', '.join(found.class_names)}; the model is for {expected.spec} and "
            f"the classes {', '.join(expected.class_names)}. Read the data for the "
            "model at hand"
        )
