"""An exported global model: a folder with weights and a card that describes them.

The folder is what sites receive. Its fingerprint covers everything that embeddings and
probabilities depend on, so that a store knows which model embedded it.
"""

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
from knnper.data.site_task import SiteTask, require_input_size
from knnper.datastore.memory import KnnSettings, default_memory
from knnper.errors import KnnPerError, Problem, RunError
from knnper.experiment import Experiment, Precision, TrainingSettings
from knnper.experiment_file import to_document
from knnper.exported_weights import LAYOUT, VECTOR, Layout, read_layout
from knnper.files import parse_json, require_plain, whole_folder, write_atomically
from knnper.models import MODELS, OWN_MODEL, network_size, with_local_files
from knnper.own import CLOSED, Door
from knnper.process import known_precision, num_threads
from knnper.reasons import Code, SafeReason
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings, is_reference, parse_settings
from knnper.strategies.auto import AutoSettings
from knnper.strategies.catalogue import method_of
from knnper.strategies.core.assembly import build_task
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.knn_fine_tuned import FineTunedMemorySettings
from knnper.weight_files import WEIGHTS

SOURCE = "sha256 of the source"  # key in the section ``model`` for a user's own model
FORMAT = 1  # of the folder of an exported model
DESCRIPTION = "model.json"
MOST_FROZEN = 2**28
"""The most frozen numbers of a network beside its file of weights; 1 GB as float32."""


class ModelError(KnnPerError):
    """A global model is missing, damaged, or not the expected one."""

    reasons = (SafeReason(Code.OTHER_MODEL),)


@dataclass(frozen=True)
class ModelCard:
    """Everything needed to use a global model beside its weights; plain values only."""

    name: str  # of the experiment that trained it
    model: Mapping[str, Any]  # the section ``model`` without ``weights``
    precision: Precision  # of forward passes
    evaluation_batch_size: int  # images in one forward pass without training
    # Threads of torch in each process of the run; another number may change the last
    # bits.
    num_threads: int
    seed: int  # of the experiment
    spec: InputSpec  # shape and type of the input, number of classes, normalisation
    class_names: tuple[str, ...]  # one for each label
    feature_names: tuple[str, ...]  # names of a row's columns; empty for images
    method: str  # title of the method that trained it
    num_rounds: int  # rounds of training
    # Settings of a client's memory: those in the experiment's ``personalization``, else
    # `default_memory`.
    memory: KnnSettings

    def __post_init__(self) -> None:
        require_input_size(self.spec)

    @property
    def learned(self) -> SiteTask:
        """The input, classes and features of the model, on which sites must agree."""
        return SiteTask(self.spec, self.class_names, self.feature_names)

    def architecture(self, door: Door = CLOSED) -> Choice[Settings]:
        """Return the section ``model``; a user's own code is opened by ``door``."""
        settings = dict(self.model)
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
                f"this version of the software cannot build the model ({wrong}); "
                "install the version that exported it"
            )
        choice = Choice(
            name, parsed, None if own_code is None else own_code.entry, source
        )
        return with_local_files(choice, door)


CARD = TypeAdapter(ModelCard)


def card_of(experiment: Experiment, learned: SiteTask) -> ModelCard:
    """Return the card of the model that an experiment trains."""
    model = to_document(experiment)["model"]
    del model["weights"]
    if is_reference(model["name"]):
        model[SOURCE] = experiment.model.fingerprint
    return ModelCard(
        name=experiment.name,
        model=model,
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
    """Return the first settings of a memory in a personalisation, or None."""
    if isinstance(settings, AutoSettings):
        memories = (_memory_of(candidate.settings) for candidate in settings.candidates)
        return next(filter(None, memories), None)
    if isinstance(settings, FineTunedMemorySettings):
        return settings.memory
    return settings if isinstance(settings, KnnSettings) else None


@dataclass(frozen=True)
class _Identity(Record):
    """Everything that an embedding depends on, beside the input itself.

    The names of the fields enter the fingerprint.
    """

    weights: Tensor
    model: dict[str, object]
    spec: InputSpec
    precision: str


def fingerprint_of(card: ModelCard, weights: Tensor) -> str:
    """Return the SHA-256, in hexadecimal, of all that φ and the head depend on."""
    model = {name: _hashable(value) for name, value in card.model.items()}
    return fingerprint(_Identity(weights, model, card.spec, card.precision))


def _hashable(value: Any) -> Any:
    """Convert lists to tuples, as records require."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return {name: _hashable(item) for name, item in value.items()}
    return value


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model as read from files, before any code of it runs."""

    card: ModelCard
    weights: Tensor  # w, shape (num_weights,)
    # SHA-256, in hexadecimal, of weights, model name and settings, normalisation and
    # precision.
    fingerprint: str
    # Positions of the tensors in ``weights``, by `Layout`; empty if unknown.
    layout: str = field(default="", kw_only=True)


@dataclass(frozen=True, eq=False)
class GlobalModel(StoredModel):
    """φ and the head of a trained model; made by `global_model` or `load_model`."""

    task: Task  # runs the model; thread-safe after the first pass

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
        """Shape and type of the input, number of classes, normalisation."""
        return self.card.spec

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names, one for each label."""
        return self.card.class_names


def global_model(
    experiment: Experiment, task: Task, learned: SiteTask, weights: Tensor
) -> GlobalModel:
    """Make the global model of a finished run of ``experiment``."""
    card = card_of(experiment, learned)
    layout = Layout.of(task.model).to_json()
    fingerprint = fingerprint_of(card, weights)
    return GlobalModel(card, weights, fingerprint, task, layout=layout)


def model_of_card(stored: StoredModel, architecture: Choice[Settings]) -> GlobalModel:
    """Build the model that a card describes, with its opened ``architecture``."""
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


def _require_stated_size(
    architecture: Choice[Settings], spec: InputSpec, weights: Tensor
) -> None:
    """Check that the network of a card has the size of the file of weights.

    Done before the network is built, so that no card can fill the memory.
    """
    size = network_size(architecture, spec)
    if size is None:
        return
    if architecture.settings.trained == "all":  # type: ignore[attr-defined]
        _require_weights(weights, size)
    elif size > len(weights) + MOST_FROZEN:
        raise ModelError(
            f"the model has {size} numbers and its file {len(weights)}; expected at "
            f"most {MOST_FROZEN} frozen numbers beside the file"
        )


def _require_weights(weights: Tensor, count: int) -> None:
    """Check that weights have the number and type of a network's."""
    if tuple(weights.shape) != (count,) or weights.dtype != torch.float32:
        raise ModelError(
            f"expected weights of shape {(count,)} and type float32, found "
            f"{tuple(weights.shape)} and {weights.dtype}; they belong to another model"
        )


def ends_with_global_model(experiment: Experiment) -> bool:
    """Return whether a run ends with one trained model for all clients."""
    return method_of(experiment.method).ends_with_global_model


def require_global_model(experiment: Experiment, source: str) -> None:
    """Raise RunError if the method does not end with one model for all clients."""
    if not ends_with_global_model(experiment):
        title = method_of(experiment.method).title
        raise RunError(
            f"{source} trained with {title}, which does not end with "
            "one model for all clients; expected a run of a method that does, such as "
            "FedAvg or kNN-Per"
        )


def require_fingerprint(model: StoredModel, expected: str, source: str) -> None:
    """Raise ModelError if a model does not have the expected fingerprint."""
    if model.fingerprint != expected:
        raise ModelError(
            f"{source}: expected the model {expected[:12]}, found "
            f"{model.fingerprint[:12]}; it was damaged or replaced in transit, or the "
            "two sides run different versions. Download it again from its source"
        )


def is_model_folder(folder: Path) -> bool:
    """Return whether ``folder`` contains a model's description."""
    return (folder / DESCRIPTION).is_file()


def save_model(folder: Path, model: StoredModel) -> None:
    """Write ``model`` to ``folder`` atomically.

    A folder with the same model is left unchanged.
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
                f"{folder} holds the model with other names of classes or features; "
                "give another folder"
            )
        return
    with whole_folder(folder) as draft:
        weights = {VECTOR: model.weights.contiguous()}
        layout = {LAYOUT: model.layout} if model.layout else None
        card = CARD.dump_python(model.card, mode="json")
        document = {
            "format": FORMAT,
            "fingerprint": model.fingerprint,
            "card": card,
        }
        write_atomically(draft / WEIGHTS, save(weights, layout))
        write_atomically(draft / DESCRIPTION, json.dumps(document, indent=2))


def load_model(folder: Path, door: Door = CLOSED) -> GlobalModel:
    """Load the model in ``folder``, verified by its fingerprint.

    Users' own code and pretrained networks that its card names are opened by ``door``
    only.
    """
    stored = read_model(folder)
    return model_of_card(stored, stored.card.architecture(door))


def read_model(folder: Path) -> StoredModel:
    """Read the model files in ``folder``, verified by the fingerprint; run no code."""
    require_plain(folder)
    card, expected = _card(folder / DESCRIPTION)
    path = folder / WEIGHTS
    try:
        weights = load_file(path)[VECTOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); export the model again"
        ) from error
    # Contiguous, since the memory layout affects the last bits of products.
    copied = weights.clone(memory_format=torch.contiguous_format)
    fingerprint, layout = fingerprint_of(card, copied), read_layout(path)
    model = StoredModel(card, copied, fingerprint, layout=layout)
    require_fingerprint(model, expected, str(folder))
    return model


def _card(path: Path) -> tuple[ModelCard, str]:
    """Read card and fingerprint from a model's description."""
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
            f"{path} cannot be read, or was written by another version of the software "
            f"({error}); export the model again"
        ) from error
