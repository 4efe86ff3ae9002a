"""From a filled memory to what is served with it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from client.residence.measuring import UNKNOWN, Estimate, estimate
from client.residence.serving import Accuracy, Gain, MeasuredOn, Serving, TunedOn
from client.residence.testing import Tested, tested
from datastore.store_reader import StoreReader
from knnper.data.site.site_data import SiteData
from knnper.transport.model_folder.global_model import GlobalModel
from strategies.core.memory import Tuned


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
    found = tested(model, filled.store, serving, data.test.examples)
    if len(data.test) > 0:
        serving = replace(serving, accuracy=found.accuracy())
    return Decided(serving, found, _described(model, filled))


def _overruled(tuned: Tuned) -> Tuned:
    """Return what serves the global model alone."""
    alone = replace(tuned.choice, knn_weight=0.0, class_prior=None)
    return replace(tuned, choice=alone)


def _described(model: GlobalModel, filled: Filled) -> Mapping[str, float]:
    return filled.tuned.predictor(
        model.embed, model.head, filled.store, model.card.memory
    ).describe()


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
