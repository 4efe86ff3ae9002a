"""A global model in a folder of its own, with what is known of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from knnper.data.examples import InputSpec
from knnper.data.site_data import SiteTask, require_input_size
from knnper.datastore.memory import KnnSettings, default_memory
from knnper.errors import KnnPerError, Problem, RunError
from knnper.experiment import (
    Experiment,
    Precision,
    TrainingSettings,
    to_document,
)
from knnper.files import parse_json, require_plain, whole_folder, write_atomically
from knnper.models import MODELS, OWN_MODEL, located, network_size
from knnper.own import CLOSED, Door
from knnper.process import known_precision, num_threads
from knnper.reasons import Code, SafeReason
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.settings import (
    Choice,
    Settings,
    is_reference,
    later_defaults,
    parse_settings,
)
from knnper.strategies.auto import AutoSettings
from knnper.strategies.catalogue import build_task, method_of
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.knn_fine_tuned import FineTunedMemorySettings
from knnper.weight_files import LAYOUT, VECTOR, WEIGHTS, Layout, read_layout


class ModelError(KnnPerError):
    """A global model is missing, damaged, or not the one that was expected."""

    reasons = (SafeReason(Code.OTHER_MODEL),)


@dataclass(frozen=True)
class ModelCard:
    """All that using a global model takes, but its weights; plain values only."""

    name: str  # Of the experiment that trained it
    model: Mapping[str, Any]  # The section ``model``, less ``weights``
    precision: Precision  # Of forward passes
    evaluation_batch_size: int  # Images in one forward pass where nothing is trained
    # That torch used in each process of the run: for another number the last bits may
    # be others.
    num_threads: int
    seed: int  # The experiment's
    spec: InputSpec  # Shape and type of the input, number of classes, normalisation
    class_names: tuple[str, ...]  # One for each label
    # What the features of a row are called, in order; empty for images.
    feature_names: tuple[str, ...]
    method: str  # Title of the method that trained it
    num_rounds: int  # How long
    # How a client remembers: the memory in the experiment's ``personalization``, else
    # what kNN-Per does by default, with leave-one-out for clients with little
    # validation data.
    memory: KnnSettings

    def __post_init__(self) -> None:
        require_input_size(self.spec)

    @property
    def learned(self) -> SiteTask:
        """What the model knows about the data, as sites agree on it."""
        return SiteTask(self.spec, self.class_names, self.feature_names)

    def architecture(self, door: Door = CLOSED) -> Choice[Settings]:
        """Return the section ``model``; what is a user's comes through ``door``."""
        # The card of a model in this format leaves it out.
        settings = {"memory_format": "channels_last", **self.model}
        name, source = str(settings.pop("name", None)), str(settings.pop(SOURCE, ""))
        problems, parsed, own_code = list[Problem](), None, None
        wrong = f"unknown {name!r}, expected one of {', '.join(sorted(MODELS))}"
        if is_reference(name):
            own_code = door.open(name, OWN_MODEL)
            own_code.require(name, source)
        if own_code is not None or name in MODELS:
            kind = (
                MODELS[name].settings_type
                if own_code is None
                else own_code.settings_type
            )
            parsed = parse_settings(kind, settings, "model", problems)
            wrong = "; ".join(map(str, problems))
        if parsed is None:
            raise ModelError(
                f"the model is not what this version takes ({wrong}); install the "
                "version of this software that made it"
            )
        choice = Choice(
            name, parsed, None if own_code is None else own_code.entry, source
        )
        return located(choice, door)


CARD = TypeAdapter(ModelCard)
SOURCE = "sha256 of the source"  # in the section ``model``; no setting is called so

# Settings that models were given later, with what a model without them has: a card
# leaves them out then, so that a model keeps its fingerprint, and stores their model.
_LATER: Mapping[str, Mapping[str, object]] = {
    "tiny_cnn": {"norm": "none", "num_poolings": 1},
    "leaf_cnn": {"norm": "none"},
}


def card_of(experiment: Experiment, learned: SiteTask) -> ModelCard:
    """Return the card of the model that an experiment trains."""
    model = to_document(experiment)["model"]
    later = _LATER.get(model["name"], {}).items()
    left_out = {"weights", *later_defaults(experiment.model)}
    left_out |= {name for name, old in later if model[name] == old}
    if model.get("memory_format") == "channels_last":
        left_out.add("memory_format")
    if is_reference(model["name"]):
        model[SOURCE] = experiment.model.fingerprint
    return ModelCard(
        name=experiment.name,
        model={name: model[name] for name in model if name not in left_out},
        precision=known_precision(experiment.training.precision),
        evaluation_batch_size=experiment.run.evaluation_batch_size,
        num_threads=num_threads(experiment.run),
        seed=experiment.run.seed,
        spec=learned.spec,
        class_names=learned.class_names,
        feature_names=learned.feature_names,
        method=method_of(experiment.method).title,
        num_rounds=experiment.training.num_rounds,
        memory=_memory_of(experiment.personalization.settings) or default_memory(),
    )


def _memory_of(settings: Settings) -> KnnSettings | None:
    """Return the memory in a personalisation, the first of several; None without."""
    if isinstance(settings, AutoSettings):
        memories = (_memory_of(candidate.settings) for candidate in settings.candidates)
        return next(filter(None, memories), None)
    if isinstance(settings, FineTunedMemorySettings):
        return settings.memory
    return settings if isinstance(settings, KnnSettings) else None


@dataclass(frozen=True)
class _Identity(Record):
    """All that an embedding depends on but the image; fingerprints have its names."""

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
    """Return the SHA-256, in hexadecimal, of all that φ and the head depend on."""
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
    ids = spec.vocabulary
    tokens = "" if ids is None else f" {ids.size} {ids.padding_id} {ids.tokenizer}"
    return fingerprint(_FeatureIdentity(identity, spec.dtype + tokens))


def _hashable(value: Any) -> Any:
    """Return a plain value as records hold it: tuples for lists."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return {name: _hashable(item) for name, item in value.items()}
    return value


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model as files hold it: no code of it has been run."""

    card: ModelCard  # What is known of it
    weights: Tensor  # w, shape (num_weights,)
    # SHA-256, in hexadecimal, of all that φ and the head depend on: the weights, the
    # model's name and settings, how images are normalised, and the precision.
    fingerprint: str
    # Where tensors lie in ``weights``, as `Layout` writes it; empty if it is not known.
    layout: str = field(default="", kw_only=True)


@dataclass(frozen=True, eq=False)
class GlobalModel(StoredModel):
    """φ and the head of a trained model; made by `global_model` or `load_model`."""

    task: Task  # Runs it. Any number of threads may use it at a time once it has run.

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p), of inputs (n, h, w, ch)."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the model's probabilities (n, c) from its embeddings (n, p)."""
        return self.task.head(self.weights, embeddings)

    @property
    def embedding_dim(self) -> int:
        """p, the size of an embedding."""
        return self.task.model.module.embedding_dim

    @property
    def spec(self) -> InputSpec:
        """What the model knows about the data."""
        return self.card.spec

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each label."""
        return self.card.class_names


def global_model(
    experiment: Experiment, task: Task, learned: SiteTask, weights: Tensor
) -> GlobalModel:
    """Return the model that a run of ``experiment`` ended with."""
    card = card_of(experiment, learned)
    layout = Layout.of(task.model).to_json()
    fingerprint = fingerprint_of(card, weights)
    return GlobalModel(card, weights, fingerprint, task, layout=layout)


def model_of_card(stored: StoredModel, architecture: Choice[Settings]) -> GlobalModel:
    """Return the model that a card describes; its own ``architecture``, opened."""
    card, weights = stored.card, stored.weights
    _require_stated_size(architecture, card.spec, weights)
    task = build_task(
        architecture,
        TrainingSettings(precision=card.precision),
        card.spec,
        RandomKey(card.seed),
        evaluation_batch_size=card.evaluation_batch_size,
    )
    _require_weights(weights, task.model.num_weights)
    layout = stored.layout or Layout.of(task.model).to_json()
    return GlobalModel(card, weights, stored.fingerprint, task, layout=layout)


MOST_FROZEN = 2**28
"""Numbers of a network beside those in the file of its weights; 1 GB as float32."""


def _require_stated_size(
    architecture: Choice[Settings], spec: InputSpec, weights: Tensor
) -> None:
    """Refuse a card whose network does not have the size of the file of weights."""
    size = network_size(architecture, spec)
    if size is None:
        return
    if architecture.settings.trained == "all":  # type: ignore[attr-defined]
        _require_weights(weights, size)
    elif size > len(weights) + MOST_FROZEN:
        raise ModelError(
            f"the model has {size} numbers, of which its file holds {len(weights)}; "
            f"expected at most {MOST_FROZEN} more than the file, which are frozen"
        )


def _require_weights(weights: Tensor, count: int) -> None:
    """Refuse weights of another number or type than a network has."""
    if tuple(weights.shape) != (count,) or weights.dtype != torch.float32:
        raise ModelError(
            f"expected weights of shape {(count,)} and type float32, found "
            f"{tuple(weights.shape)} and {weights.dtype}; they belong to another model"
        )


def ends_with_global_model(experiment: Experiment) -> bool:
    """Return whether a run ends with one trained model for all clients."""
    return method_of(experiment.method).ends_with_global_model


def require_global_model(experiment: Experiment, source: str) -> None:
    """Refuse a method that does not end with one trained model for all clients."""
    if not ends_with_global_model(experiment):
        title = method_of(experiment.method).title
        raise RunError(
            f"{source} trained with {title}, which does not end with "
            "one model for all clients; expected a run of a method that does, such as "
            "FedAvg or kNN-Per"
        )


def require_fingerprint(model: StoredModel, expected: str, source: str) -> None:
    """Refuse a model that is not the one that was announced."""
    if model.fingerprint != expected:
        raise ModelError(
            f"{source}: expected the model {expected[:12]}, found "
            f"{model.fingerprint[:12]}; it was damaged or replaced on "
            "its way, or the two sides run different versions. Get it again from where "
            "it was exported"
        )


FORMAT = 1

DESCRIPTION = "model.json"


def is_model_folder(folder: Path) -> bool:
    """Return whether ``folder`` is, or should be, a model's."""
    return (folder / DESCRIPTION).is_file()


def save_model(folder: Path, model: StoredModel) -> None:
    """Write ``model`` to ``folder``: complete on disk, or not there, at any time.

    Where the very same model is there already, nothing is done.
    """
    if folder.exists():
        if not is_model_folder(folder):
            raise ModelError(
                f"{folder} exists and holds no model; give a new folder for the model"
            )
        existing = read_model(folder)
        if existing.fingerprint != model.fingerprint:
            raise ModelError(
                f"{folder} holds the model {existing.fingerprint[:12]}, expected to "
                f"write {model.fingerprint[:12]}; give another folder"
            )
        if existing.card.learned != model.card.learned:
            raise ModelError(
                f"{folder} holds the model with other names of classes or features, as "
                "an earlier version wrote them; give another folder"
            )
        return
    with whole_folder(folder) as draft:
        weights = {VECTOR: model.weights.contiguous()}
        layout = {LAYOUT: model.layout} if model.layout else None
        card = CARD.dump_python(model.card, mode="json")
        if model.card.spec.vocabulary is None:
            del card["spec"]["vocabulary"]
        document = {
            "format": FORMAT,
            "fingerprint": model.fingerprint,
            "card": card,
        }
        write_atomically(draft / WEIGHTS, save(weights, layout))
        write_atomically(draft / DESCRIPTION, json.dumps(document, indent=2))


def load_model(folder: Path, door: Door = CLOSED) -> GlobalModel:
    """Return the model in ``folder``, verified by its fingerprint.

    What its card names of users' code, and of networks that others trained, comes
    through the ``door`` alone.
    """
    stored = read_model(folder)
    return model_of_card(stored, stored.card.architecture(door))


def read_model(folder: Path) -> StoredModel:
    """Return what the files in ``folder`` hold, verified by its fingerprint."""
    require_plain(folder)
    card, expected = _card(folder / DESCRIPTION)
    path = folder / WEIGHTS
    try:
        weights = load_file(path)[VECTOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); export the model again"
        ) from error
    # The layout in memory shows in the last bits of products.
    copied = weights.clone(memory_format=torch.contiguous_format)
    fingerprint, layout = fingerprint_of(card, copied), read_layout(path)
    model = StoredModel(card, copied, fingerprint, layout=layout)
    require_fingerprint(model, expected, str(folder))
    return model


def _card(path: Path) -> tuple[ModelCard, str]:
    """Return card and fingerprint of the model that ``path`` describes."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        version = document.get("format")
        if version != FORMAT:
            raise ModelError(
                f"{path.parent} is a model of format {version}, expected {FORMAT}; use "
                "the version of this software that exported it, or export it again"
            )
        card = CARD.validate_json(json.dumps(document["card"]))
        return card, str(document["fingerprint"])
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} holds no model: {path.name} is missing. Give the folder "
            "that knnper fed export wrote"
        ) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{path} cannot be read, or is not what this version of the software "
            f"writes ({error}); export the model again"
        ) from error
