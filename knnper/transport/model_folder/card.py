"""What is known of a global model beside its weights, and its fingerprint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from knnper.config.document import to_document
from knnper.config.errors import Problem
from knnper.config.parsing import parse_settings
from knnper.config.sections import Choice, Experiment, Precision, Settings
from knnper.data.examples import InputSpec
from knnper.data.site.agreement import SiteTask
from knnper.machine import num_threads
from knnper.models.catalogue import MODELS
from knnper.transport.codec import fingerprint
from knnper.transport.model_folder.errors import ModelError
from strategies.catalogue import METHODS
from strategies.core.memory import KnnSettings, default_memory
from strategies.core.records import Record
from strategies.knn_fine_tuned import FineTunedMemorySettings


@dataclass(frozen=True)
class ModelCard:
    """All that using a global model takes, but its weights; plain values only.

    Attributes
    ----------
    name
        Of the experiment that trained it.
    model
        The experiment's section ``model``, less the file that training started from.
    precision
        Of forward passes.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    num_threads
        That torch used in each process of the run: for another number the last bits
        may be others.
    seed
        The experiment's.
    spec
        Shape and type of the input, number of classes, normalisation.
    class_names
        One for each label.
    feature_names
        What the features of a row are called, in order; empty for images.
    method
        Title of the method that trained it.
    num_rounds
        How long.
    memory
        How a client remembers: the experiment's ``personalization`` where that is
        kNN-Per's, else what kNN-Per does by default, with leave-one-out for clients
        with little validation data.
    """

    name: str
    model: Mapping[str, Any]
    precision: Precision
    evaluation_batch_size: int
    num_threads: int
    seed: int
    spec: InputSpec
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    method: str
    num_rounds: int
    memory: KnnSettings

    @property
    def learned(self) -> SiteTask:
        """What the model knows about the data, as sites agree on it."""
        return SiteTask(self.spec, self.class_names, self.feature_names)

    def architecture(self) -> Choice[Settings]:
        """Return the section ``model``.

        Raises
        ------
        ModelError
            If this version knows no such model, or not its settings.
        """
        settings = {key: self.model[key] for key in self.model if key != "name"}
        name, problems = str(self.model.get("name")), list[Problem]()
        if name not in MODELS:
            known = ", ".join(sorted(MODELS))
            raise ModelError(
                f"the model {name!r} is unknown, expected one of {known}; another "
                "version of this software made it: install that one"
            )
        parsed = parse_settings(MODELS[name].settings_type, settings, "model", problems)
        if parsed is None:
            lines = "; ".join(str(problem) for problem in problems)
            raise ModelError(
                f"the model's settings are not what this version takes ({lines}); "
                "install the version of this software that made it"
            )
        return Choice(name, parsed)


CARD = TypeAdapter(ModelCard)

# Settings that models were given later, with what a model without them has: a card
# leaves them out then, so that a model keeps its fingerprint, and stores their model.
_LATER: Mapping[str, Mapping[str, object]] = {
    "tiny_cnn": {"norm": "none", "num_poolings": 1},
    "leaf_cnn": {"norm": "none"},
}


def card_of(experiment: Experiment, learned: SiteTask) -> ModelCard:
    """Return the card of the model that an experiment trains.

    Parameters
    ----------
    experiment
        Its settings.
    learned
        What the model knows about the data.
    """
    model = to_document(experiment)["model"]
    later = _LATER.get(model["name"], {}).items()
    left_out = {"weights", *(name for name, old in later if model[name] == old)}
    chosen = experiment.personalization.settings
    return ModelCard(
        name=experiment.name,
        model={name: model[name] for name in model if name not in left_out},
        precision=experiment.training.precision,
        evaluation_batch_size=experiment.run.evaluation_batch_size,
        num_threads=num_threads(experiment.run),
        seed=experiment.run.seed,
        spec=learned.spec,
        class_names=learned.class_names,
        feature_names=learned.feature_names,
        method=METHODS[experiment.method.name].title,
        num_rounds=experiment.training.num_rounds,
        memory=_memory_of(chosen),
    )


def _memory_of(chosen: Settings) -> KnnSettings:
    """Return how clients remember in the experiment, or by default."""
    if isinstance(chosen, FineTunedMemorySettings):
        chosen = chosen.memory
    return chosen if isinstance(chosen, KnnSettings) else default_memory()


@dataclass(frozen=True)
class _Identity(Record):
    """All that an embedding of an image depends on but the image.

    The names of class and fields are a part of every fingerprint.
    """

    weights: Tensor
    model: dict[str, object]
    image_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    precision: str


@dataclass(frozen=True)
class _FeatureIdentity(Record):
    """The same for an input of another type, which is normalised otherwise."""

    identity: _Identity
    dtype: str


def fingerprint_of(card: ModelCard, weights: Tensor) -> str:
    """Return the SHA-256, in hexadecimal, of all that φ and the head depend on.

    The weights, the model's name and settings, how its input is normalised, and the
    precision.
    """
    spec = card.spec
    identity = _Identity(
        weights=weights,
        model={name: _hashable(value) for name, value in card.model.items()},
        image_shape=spec.image_shape,
        num_classes=spec.num_classes,
        mean=spec.mean,
        std=spec.std,
        precision=card.precision,
    )
    if spec.dtype == "uint8":
        return fingerprint(identity)
    return fingerprint(_FeatureIdentity(identity, spec.dtype))


def _hashable(value: Any) -> Any:
    """Return a plain value as records hold it: tuples for lists."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return {name: _hashable(item) for name, item in value.items()}
    return value
