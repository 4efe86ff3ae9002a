"""Files of weights that this project wrote: one vector, and the layout of its tensors.

The metadata hold the position of each tensor in the vector, and the fingerprint of the
frozen weights, which the file does not hold.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from knnper.embedding_model import EmbeddingModel, MemoryFormat
from knnper.errors import ConfigError, Problem
from knnper.flat_model import FlatModel, part_as_tensor
from knnper.trained_layers import frozen_fingerprint
from knnper.weight_files import (
    HEAD,
    PLACE,
    as_names,
    as_numbers,
    load_tensors,
    located,
    shortened,
)

VECTOR = "weights"  # name of the vector in it
LAYOUT = "layout"  # key of the layout in its metadata


@dataclass(frozen=True)
class Layout:
    """Positions of the tensors in the vector of a model's weights."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, in the order of the vector
    memory_format: MemoryFormat
    frozen: str  # SHA-256 of the weights outside the vector; empty if there are none

    @classmethod
    def of(cls, model: FlatModel) -> "Layout":
        """Return the layout of a model's weights."""
        shapes = {entry.name: entry.shape for entry in model.entries}
        return cls(shapes, model.module.memory_format, model.frozen)

    def to_json(self) -> str:
        """Return the layout as text for `from_json`."""
        return json.dumps(
            {
                "tensors": [[name, list(shape)] for name, shape in self.shapes.items()],
                "memory_format": self.memory_format,
                "frozen": self.frozen,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Read a text of `to_json`; raise `ValueError` if it is no layout."""
        document = json.loads(text)
        shapes = {
            str(name): tuple(int(side) for side in shape)
            for name, shape in document["tensors"]
        }
        if any(side < 0 for shape in shapes.values() for side in shape):
            raise ValueError("found a negative length of a side")
        memory_format = document["memory_format"]
        if memory_format not in ("channels_last", "contiguous"):
            raise ValueError(f"unknown memory format {memory_format!r}")
        return cls(shapes, memory_format, str(document["frozen"]))

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a vector by name."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        if vector.dim() != 1 or sum(sizes) != len(vector):
            raise ValueError(f"expected {sum(sizes)} numbers, found {len(vector)}")
        parts = torch.split(vector, sizes)
        return {
            name: part_as_tensor(part, shape, self.memory_format)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


@dataclass(frozen=True)
class TrainedTensors:
    """The tensors of a model that this project wrote: all, or the trained part."""

    path: Path
    tensors: Mapping[str, Tensor]
    frozen: str  # as in `Layout`


def read_layout(path: Path) -> str:
    """Return the text of the layout in a file; empty if it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get(LAYOUT, ""))
    except (OSError, SafetensorError):
        return ""


def read_trained(name: str) -> TrainedTensors | None:
    """Read the tensors of a model that this project wrote; None for another file."""
    path = located(name)
    if not (text := read_layout(path)):
        return None
    try:
        layout = Layout.from_json(text)
        tensors = layout.tensors(load_file(path)[VECTOR])
    except (
        OSError,
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        message = (
            f"{path} is damaged, expected a model as `knnper fed export` writes it: "
            f"{error}"
        )
        raise ConfigError([Problem(PLACE, message)]) from error
    return TrainedTensors(path, tensors, layout.frozen)


def by_origin(
    weights: str | Sequence[str] | None,
) -> tuple[tuple[str, ...] | None, list[TrainedTensors]]:
    """Split ``model.weights`` into foreign files and models that this project wrote.

    The first part is None if there are no foreign files.
    """
    by_name = {name: read_trained(name) for name in as_names(weights)}
    others = tuple(name for name, trained in by_name.items() if trained is None)
    return others or None, [trained for trained in by_name.values() if trained]


def load_trained(module: EmbeddingModel, trained: TrainedTensors) -> bool:
    """Copy the tensors of a model that this project wrote into ``module``.

    A head for other classes is not loaded. If a trained part has a tensor that
    ``module`` lacks, nothing is copied and False returned: it may belong to an adapter
    that is not added yet, so the caller tries again once it is.

    Raises
    ------
    ConfigError
        If it is another model, or lacks the frozen weights that belong to these.
    """
    tensors, source = trained.tensors, str(trained.path)
    if not trained.frozen:  # a whole model
        load_tensors(module, tensors, source, HEAD)
        return True
    state = module.state_dict(keep_vars=True)
    if not tensors.keys() <= state.keys():
        return False
    frozen = frozen_fingerprint(module, {id(state[name]) for name in tensors})
    if frozen != trained.frozen:
        message = (
            f"{source} holds trained weights that belong to frozen weights with the "
            f"fingerprint {trained.frozen[:12]}, found {frozen[:12]}: put the file of "
            f"the frozen weights before it, model.weights: [FILE, {source}]"
        )
        raise ConfigError([Problem(PLACE, message)])
    misfits = {
        name for name, tensor in tensors.items() if tensor.shape != state[name].shape
    }
    of_head = {name for name in tensors if name.startswith(f"{HEAD}.")}
    left_out = of_head if misfits & of_head else set[str]()
    if misfits - of_head or left_out == tensors.keys():
        name = min(misfits)
        message = (
            f"expected shape {tuple(state[name].shape)}, found "
            f"{tuple(tensors[name].shape)}; is it for another model?"
        )
        raise ConfigError([Problem(name, message)], source)
    for name in tensors.keys() - left_out:
        state[name].data.copy_(as_numbers(tensors[name], state[name]))
    return True


def raise_missing(module: nn.Module, trained: TrainedTensors) -> NoReturn:
    """Raise a `ConfigError` with the tensors of a file that a model lacks."""
    message = (
        "the model has no such tensor; expected the model.trained and model.lora of "
        "the run that wrote it"
    )
    names = sorted(trained.tensors.keys() - module.state_dict().keys())
    problems = [Problem(name, message) for name in names]
    raise ConfigError(shortened(problems), str(trained.path))
