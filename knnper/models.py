"""The models that an experiment can choose, and how one is built."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from knnper.data.examples import KINDS_OF_INPUT, InputSpec
from knnper.data.normalization import normalizer
from knnper.embedding_model import (
    EmbeddingModel,
    ModelSettings,
    Network,
    OwnModelSettings,
    require_input,
)
from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.exported_weights import (
    TrainedTensors,
    by_origin,
    load_trained,
    raise_missing,
)
from knnper.flat_model import FlatModel
from knnper.layers import use_faster_layers
from knnper.networks import (
    LeafCnn,
    Mlp,
    MobileNetV2,
    ResNet18,
    SmallResNet,
    SoftmaxRegression,
    StackedLstm,
    TinyCnn,
)
from knnper.own import Door, Kind, arguments, explained, given_to
from knnper.pretrained import (
    Pretrained,
    PretrainedSettings,
    TimmNetwork,
    TorchvisionNetwork,
    TransformersNetwork,
)
from knnper.reasons import Code, SafeReason
from knnper.seeding import RandomKey
from knnper.settings import Choice, Settings
from knnper.split_network import NAME_IT, natural, split
from knnper.trained_layers import train_only
from knnper.trial import try_out
from knnper.weight_files import as_names, load_weights

S = TypeVar("S", bound=Settings)

OWN_MODEL = Kind(
    "a torch.nn.Module class, or a function that returns a module",
    base=OwnModelSettings,
    supplied=("num_classes", "input_shape", "spec"),
)

MODELS: Mapping[str, type[Network]] = {
    network.name: network
    for network in (
        LeafCnn,
        TinyCnn,
        SmallResNet,
        MobileNetV2,
        ResNet18,
        Mlp,
        SoftmaxRegression,
        StackedLstm,
        TorchvisionNetwork,
        TimmNetwork,
        TransformersNetwork,
    )
}
"""The models that can be chosen by name."""


def _own_model(choice: Choice[Settings], spec: InputSpec) -> EmbeddingModel:
    """Return a user's network, split; see `OWN_MODEL`."""
    entry, settings = choice.entry, choice.settings
    height, width, channels = spec.image_shape
    is_row = (height, width) == (1, 1)
    possible = {
        "num_classes": spec.num_classes,
        "input_shape": (channels,) if is_row else (channels, height, width),
        "spec": spec,
    }
    with explained():
        if isinstance(entry, type) and issubclass(entry, Network):
            model = entry(settings, spec)
        else:
            chosen = arguments(settings, OwnModelSettings)
            model = entry(**chosen, **given_to(entry, **possible))
    if isinstance(model, EmbeddingModel):
        assert isinstance(settings, ModelSettings), "of the network's settings type"
        load_weights(model, settings.weights, published=model.published_head)
        return model
    if not isinstance(model, nn.Module):
        type_name = type(model).__name__
        raise OwnCodeError(f"{choice.name} returned {type_name}, expected a nn.Module")
    assert isinstance(settings, OwnModelSettings), "of the kind's base"
    stored = torch.zeros((2, *spec.image_shape), dtype=spec.torch_dtype)
    return split(
        model,
        natural(normalizer(spec)(stored)),
        num_classes=spec.num_classes,
        representation=settings.representation,
        name=choice.name,
        fix=NAME_IT,
        load=lambda network, head: load_weights(network, settings.weights, head),
    )


def with_local_files(
    choice: Choice[S], door: Door, *, only_local: bool = True
) -> Choice[S]:
    """Return the choice with the files of weights that this machine has for it.

    ``only_local``: whether files that the experiment names are dropped where this
    machine has none.
    """
    settings, files = choice.settings, door.pretrained
    if files is None or not isinstance(settings, ModelSettings):
        return choice
    stated = _stated(choice)
    keys = (stated, Path(stated).name, choice.name)
    file = next((str(files[key]) for key in keys if key in files), None)
    if file is None and not only_local:
        return choice
    changes: dict[str, Any] = {"weights": file}
    if isinstance(settings, PretrainedSettings):
        changes["download"] = False
    if choice.name == TransformersNetwork.name:
        if file is None:
            message = (
                f"found {stated}, and not where its folder is on this machine; write "
                f"in the client's file pretrained: {{{keys[1]}: FOLDER}}"
            )
            reasons = (SafeReason(Code.FROZEN_WEIGHTS),)
            raise ConfigError([Problem("model.architecture", message, reasons)])
        changes |= {"architecture": file, "weights": None}
    return replace(choice, local=replace(settings, **changes))


def _stated(choice: Choice[Settings]) -> str:
    return str(getattr(choice.settings, "architecture", choice.name))


def with_whole_paths(choice: Choice[S]) -> Choice[S]:
    """Return the choice with absolute paths of the files that it names."""

    def whole(name: str) -> str:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name

    paths: dict[str, Any] = {}
    for key in ("weights", "architecture"):
        value = getattr(choice.settings, key, None)
        if isinstance(value, str):
            paths[key] = whole(value)
        elif value is not None:
            paths[key] = tuple(map(whole, value))
    return replace(choice, settings=replace(choice.settings, **paths))


def can_be_narrower(choice: Choice[Settings]) -> bool:
    """Return whether the model has a ``width``, as `ScalableSettings` or a user's."""
    return isinstance(getattr(choice.settings, "width", None), float)


def narrower(choice: Choice[Settings], ratio: float) -> Choice[Settings]:
    """Return the choice of the model at a part of its width, with random weights."""
    settings: Any = choice.settings
    changed = replace(settings, width=settings.width * ratio, weights=None)
    return replace(choice, settings=changed, local=None)


def network_size(choice: Choice[Settings], spec: InputSpec) -> int | None:
    """Count the real numbers of a network without taking memory for them.

    None for users' networks and those of libraries.
    """
    settings, kind = choice.local or choice.settings, MODELS.get(choice.name)
    if kind is None or issubclass(kind, Pretrained):
        return None
    with torch.device("meta"):
        module = kind(settings, spec)
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def build_model(
    choice: Choice[Settings],
    spec: InputSpec,
    rng: RandomKey,
    device: torch.device = torch.device("cpu"),
) -> FlatModel:
    """Return the chosen model for inputs of this form, initialised, on ``device``.

    ``rng`` fixes the random initial weights, which are the same on every device.
    """
    settings = choice.local or choice.settings
    assert isinstance(settings, ModelSettings), "of the kind's base"
    files, trained = by_origin(settings.weights)
    settings = replace(settings, weights=files)
    if choice.entry is not None:
        with rng.torch():
            module = _own_model(replace(choice, settings=settings), spec)
            _set_trained(module, settings, trained)
        return _flat(module, choice, spec, device)
    kind = MODELS[choice.name]
    if not isinstance(settings, kind.settings_type):
        type_name = type(settings).__name__
        raise TypeError(
            f"{choice.name} takes {kind.settings_type.__name__}, found {type_name}"
        )
    kinds = " or ".join(KINDS_OF_INPUT[dtype] for dtype in kind.takes)
    holds = spec.dtype in kind.takes
    require_input(spec, choice.name, holds=holds, expected=kinds)
    with rng.torch():
        module = kind(settings, spec)
        if not isinstance(module, Pretrained):
            load_weights(module, files, published=module.published_head)
        _set_trained(module, settings, trained)
    module.replayable = not isinstance(module, Pretrained)
    return _flat(module, choice, spec, device)


def _set_trained(
    module: EmbeddingModel, settings: ModelSettings, trained: Sequence[TrainedTensors]
) -> None:
    """Load models that this project wrote, and freeze the weights not to be trained."""
    waiting = [file for file in trained if not load_trained(module, file)]
    train_only(module, settings)
    for file in waiting:
        if not load_trained(module, file):
            raise_missing(module, file)


def is_tried_out(choice: Choice[Settings]) -> bool:
    """Return whether `try_out` runs the network: one of a user or a library."""
    return choice.entry is not None or issubclass(MODELS[choice.name], Pretrained)


def _title(choice: Choice[Settings]) -> str:
    """Return the model's name for messages, with the architecture of a library's."""
    architecture = getattr(choice.settings, "architecture", "")
    return f"{choice.name} {architecture}" if choice.entry is None else choice.name


def _flat(
    module: EmbeddingModel,
    choice: Choice[Settings],
    spec: InputSpec,
    device: torch.device,
) -> FlatModel:
    """Return the flat model; reject frozen weights other than the settings'."""
    settings = choice.local or choice.settings
    assert isinstance(settings, ModelSettings), "checked by `build_model`"
    use_faster_layers(module)
    if settings.memory_format is not None:
        module.memory_format = settings.memory_format
    elif is_tried_out(choice):
        try_out(module, spec, _title(choice), is_users=choice.entry is not None)
    flat, files = FlatModel(module, device), ", ".join(as_names(settings.weights))
    if settings.frozen is not None and flat.frozen != settings.frozen:
        message = (
            f"expected a model whose frozen weights have the fingerprint "
            f"{settings.frozen[:12]}, found {flat.frozen[:12] or 'none frozen'}, "
            f"{'made of ' + files if files else 'random ones'}; "
            "give the file of weights that the others have, in model.weights, and "
            "where experiment or model are from elsewhere in the file of the client "
            f"or server: pretrained: {{{_stated(choice).rpartition('/')[2]}: FILE}}"
        )
        reasons = (SafeReason(Code.FROZEN_WEIGHTS),)
        raise ConfigError([Problem("model.weights", message, reasons)])
    return flat
