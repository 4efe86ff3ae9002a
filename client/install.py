"""Installing a model at a site: its memory, its hyper-parameters, and updates of both.

A first installation builds the store aside and moves it into place. A later one is
prepared in `StateFolder.pending` and then applied to the store in steps that can be
repeated, so that a kill at any time loses nothing. The process that has the store open
for writing, such as the service, applies it (`settle`).
"""

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from knnper.client.data_changes import find_changes, retry_if_deleted
from knnper.client.expected_gain import estimate
from knnper.client.state import (
    Accuracy,
    Gain,
    MeasuredOn,
    Offered,
    Pending,
    Serving,
    SiteStateError,
    StateFolder,
    TunedOn,
    pending_serving,
    read_serving,
    remove_pending,
    write_pending,
    write_serving,
)
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import (
    Contents,
    InputLayout,
    NewExamples,
    NotErasedError,
    Selection,
    StoreSpec,
)
from knnper.datastore.memory import store_settings_of
from knnper.datastore.store import (
    Store,
    StoreReader,
    create_store,
    empty_memory_store,
    open_store,
    read_identity,
)
from knnper.datastore.tuning import Tuned, fill_and_tune
from knnper.files import sync_to_disc
from knnper.seeding import RandomKey
from knnper.strategies.core.evaluation import score
from knnper.strategies.core.exported_model import (
    GlobalModel,
    ModelError,
    read_model,
    save_model,
)

BATCH_SIZE = 256  # examples that are added, and made durable, together
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decided:
    """The outcome of an installation.

    Attributes
    ----------
    serving
        The model that is served, and how.
    mixed, global_model
        Probabilities of the test split by the mixture and the global model,
        float32 (n, c).
    chosen
        Hyper-parameters of the predictor, by name.
    """

    serving: Serving
    mixed: Tensor
    global_model: Tensor
    chosen: Mapping[str, float]


def build(
    folder: StateFolder,
    name: str,
    model: GlobalModel,
    data: SiteData,
    *,
    took_part: bool,
) -> Decided:
    """Make a client's first memory of its training and validation splits."""
    draft = folder.drafts / "store"
    key = RandomKey(model.card.seed).child("personalize", name)
    settings = store_settings_of(model.card.memory, key)
    with create_store(
        draft, store_spec(model), model.embedding_dim, model.fingerprint, settings
    ) as store:
        train, validation = (
            replace(_embed(model, split.examples), external_ids=split.names)
            for split in (data.train, data.validation)
        )
        tuned = fill_and_tune(store, train, validation, model.head, model.card.memory)
        decided = _decide(model, store, tuned, len(train), data, took_part=took_part)
    with folder.committing():
        _keep_model(folder, model)
        draft.rename(folder.store)
        sync_to_disc(folder.path)
        Offered(folder).add(data.train.names + data.validation.names)
        write_serving(folder.serving, decided.serving)
    folder.drafts.rmdir()
    return decided


def prepare(
    folder: StateFolder,
    model: GlobalModel,
    data: SiteData,
    *,
    took_part: bool,
    forget_vanished: bool = False,
) -> Decided:
    """Decide how ``model`` will be served with the updated memory, and write it down.

    Examples that were deleted from the store are not added again. Examples that are now
    in the test split leave the store, where each would be its own neighbour. Changed
    examples are replaced.
    """
    _require_same_task(folder, model)
    with open_store(folder.store) as store:
        offered = Offered(folder)
        settings = store.settings
        plan = retry_if_deleted(
            lambda: _plan_update(store, model, offered, data, forget_vanished)
        )
    # λ, k and σ are chosen on a copy in memory of what the store is going to hold.
    memory = empty_memory_store(
        store_spec(model), model.embedding_dim, model.fingerprint, settings
    )
    tuned = fill_and_tune(
        memory, plan.train, plan.validation, model.head, model.card.memory
    )
    decided = _decide(model, memory, tuned, len(plan.train), data, took_part=took_part)
    pending = Pending(decided.serving, plan.new, plan.embeddings, plan.leaving)
    with folder.committing():
        _keep_model(folder, model)
        write_pending(folder, pending)
    return decided


def settle(
    folder: StateFolder, store: Store, pending: Pending, model: GlobalModel
) -> None:
    """Apply a pending installation to the store, and serve its model.

    A call that was interrupted at any point can be repeated.
    """
    offered = Offered(folder)
    # The first change: after a kill a store of another model than the served one shows
    # that this has begun (`open_served`).
    store.reembed(model.embed, model.fingerprint)
    if pending.leaving:
        try:
            store.delete(Selection(external_ids=pending.leaving))
        except NotErasedError as error:
            # They are deleted; the store retries erasing their bytes.
            _LOG.warning("%s", error)
        offered.withdraw(pending.leaving)
    new = pending.new
    # Some may have been added before an interruption, or by name through the service.
    stored = set(store.external_ids(store.select(Selection(external_ids=new.names))))
    missing = [at for at, name in enumerate(new.names) if name not in stored]
    for start in range(0, len(missing), BATCH_SIZE):
        rows = missing[start : start + BATCH_SIZE]
        store.add(_new_examples(pending, rows), model.fingerprint)
    offered.add(new.names)
    _serve(folder, pending.serving)


def store_spec(model: GlobalModel) -> StoreSpec:
    """Return the store's form for ``model``; inputs are kept for re-embedding."""
    spec = model.spec
    layout = InputLayout(spec.image_shape, spec.stored_dtype)
    return StoreSpec(spec.num_classes, layout, model.class_names)


def _decide(
    model: GlobalModel,
    store: StoreReader,
    tuned: Tuned,
    num_train: int,
    data: SiteData,
    *,
    took_part: bool,
) -> Decided:
    """Serve the tuned mixture, or the global model alone where the mixture loses.

    The first ``num_train`` ids of the store are of training examples. The gain of a
    client that ``took_part`` in training is estimated on the others alone. This is the
    only place that reads a site's test split.
    """
    # 1. Estimate the gain, and fall back to the global model on a loss.
    settings = model.card.memory
    accuracy = Accuracy()
    gain = Gain()
    ids = torch.from_numpy(store.contents().ids)
    if len(ids) > 1:
        positions = torch.arange(len(ids))
        measured_on: MeasuredOn = "leave_one_out"
        if took_part:
            positions, measured_on = positions[ids > num_train], "validation"
        accuracy, gain = estimate(model, store, positions, settings, measured_on)
    is_loss = gain.is_loss
    if is_loss:
        fallback = replace(tuned.choice, knn_weight=0.0, class_prior=None)
        tuned = replace(tuned, choice=fallback)
    choice = tuned.choice
    if choice.knn_weight == 0 and choice.class_prior is None:
        accuracy = replace(accuracy, mixed=accuracy.global_model)
        gain = replace(gain, expected=0.0, margin=0.0)

    # 2. Measure the accuracy on the test split, if there is one.
    predictor = tuned.predictor(model.embed, model.head, store, settings)
    test = data.test.examples
    prediction = predictor.explain(test.images)
    p_knn = prediction.vote.probabilities
    if len(test) > 0:
        accuracy = Accuracy(
            score(prediction.global_probabilities, test.labels).accuracy,
            None if p_knn is None else score(p_knn, test.labels).accuracy,
            score(prediction.probabilities, test.labels).accuracy,
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
        serving,
        prediction.probabilities,
        prediction.global_probabilities,
        predictor.describe(),
    )


def _keep_model(folder: StateFolder, model: GlobalModel) -> None:
    """Save a model, in place of a damaged copy."""
    path = folder.model(model.fingerprint)
    try:
        save_model(path, model)
    except ModelError as error:
        _LOG.warning("%s; replaced by the model at hand", error)
        shutil.rmtree(path)
        save_model(path, model)


def _serve(folder: StateFolder, serving: Serving) -> None:
    """Record what is served, and remove models that are no longer referred to."""
    with folder.committing():
        before = read_serving(folder.serving)
        previous = None
        if before is not None:
            is_same = before.model == serving.model
            previous = before.previous if is_same else before.model
        write_serving(folder.serving, replace(serving, previous=previous))
        needed = {serving.model, previous}
        pending = pending_serving(folder)
        if pending == serving:
            remove_pending(folder)
        elif pending is not None:  # a newer one was prepared in the meantime
            needed |= {pending.model, pending.previous}
        for path in folder.models.iterdir():
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


def _require_same_task(folder: StateFolder, model: GlobalModel) -> None:
    """Reject a model of other inputs, classes or features than the examples have."""
    needed = store_spec(model)
    stored = read_identity(folder.store).spec
    if needed != stored:
        shapes = [
            None if spec.input is None else spec.input.shape
            for spec in (needed, stored)
        ]
        raise SiteStateError(
            f"the model takes inputs of shape {shapes[0]} of the classes "
            f"{', '.join(needed.class_names)}; expected those of {folder.store}: shape "
            f"{shapes[1]}, classes {', '.join(stored.class_names)}. Give the client "
            "another `state` folder for another task"
        )
    serving = read_serving(folder.serving)
    if serving is None:
        return
    try:
        features = read_model(folder.model(serving.model)).card.feature_names
    except ModelError:
        return  # it is damaged, and its description cannot be trusted
    names = model.card.feature_names
    if names and features and names != features:
        raise SiteStateError(
            f"the model takes the features {', '.join(names)}; expected those of the "
            f"examples in {folder.store}, in their order: {', '.join(features)}. Give "
            "the client another `state` folder for another task"
        )


@dataclass(frozen=True)
class _Plan:
    """The future contents of a store by split, and the changes that lead there.

    Attributes
    ----------
    train, validation
        All examples that will be stored, embedded by the new model.
    new, embeddings
        Examples to add, and their embeddings.
    leaving
        Names of the examples to delete.
    """

    train: NewExamples
    validation: NewExamples
    new: NamedExamples
    embeddings: Tensor
    leaving: tuple[str, ...]


def _plan_update(
    store: StoreReader,
    model: GlobalModel,
    offered: Offered,
    data: SiteData,
    forget_vanished: bool,
) -> _Plan:
    changes = find_changes(store, offered, data)
    contents = store.contents()
    names = store.external_ids(contents.ids)
    vanished = changes.vanished if forget_vanished else ()
    leaving = (*changes.tested, *changes.changed, *vanished)
    left = frozenset(leaving)
    held_out = frozenset(data.validation.names)
    stays = np.array([name not in left for name in names], dtype=np.bool_)
    is_held_out = np.array([name in held_out for name in names], dtype=np.bool_)
    added = frozenset((*changes.new, *changes.changed))
    arriving = [
        _take(split, [row for row, name in enumerate(split.names) if name in added])
        for split in (data.train, data.validation)
    ]
    stored = [
        _embed_stored(store, model, contents.take(stays & in_split))
        for in_split in (~is_held_out, is_held_out)
    ]
    embedded = [_embed(model, split.examples) for split in arriving]
    return _Plan(
        train=_join(stored[0], embedded[0]),
        validation=_join(stored[1], embedded[1]),
        new=NamedExamples(
            arriving[0].examples.join(arriving[1].examples),
            arriving[0].names + arriving[1].names,
        ),
        embeddings=torch.cat([split.embeddings for split in embedded]),
        leaving=leaving,
    )


def _embed_stored(
    store: StoreReader, model: GlobalModel, contents: Contents
) -> NewExamples:
    """Embed stored examples by ``model``, or reuse the store's embeddings by it."""
    images = store.inputs(contents.ids)
    examples = Examples(images, torch.from_numpy(contents.labels))
    if store.fingerprint != model.fingerprint:
        return _embed(model, examples)
    embeddings = store.vectors(contents.ids)
    if store.fingerprint != model.fingerprint:  # another process re-embedded it
        return _embed(model, examples)
    return NewExamples(embeddings, examples.labels, images)


def _embed(model: GlobalModel, examples: Examples) -> NewExamples:
    return NewExamples(model.embed(examples.images), examples.labels, examples.images)


def _new_examples(pending: Pending, rows: list[int]) -> NewExamples:
    """Return some of the pending examples in the form that a store takes."""
    part = _take(pending.new, rows)
    embeddings = pending.embeddings[torch.tensor(rows)]
    return NewExamples(
        embeddings, part.examples.labels, part.examples.images, part.names
    )


def _join(first: NewExamples, second: NewExamples) -> NewExamples:
    assert first.inputs is not None
    assert second.inputs is not None
    return NewExamples(
        torch.cat([first.embeddings, second.embeddings]),
        torch.cat([first.labels, second.labels]),
        torch.cat([first.inputs, second.inputs]),
    )


def _take(split: NamedExamples, rows: list[int]) -> NamedExamples:
    examples = split.examples.take(torch.tensor(rows, dtype=torch.int64))
    return NamedExamples(examples, tuple(split.names[row] for row in rows))
