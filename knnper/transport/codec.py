"""Records to tensors and text, and back: the one encoding used on wire and disk."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from knnper.config.errors import CodecError
from knnper.transport.rebuilding import rebuild

R = TypeVar("R")

_MOST_AXES = 16
# Beyond it, what torch computes of a shape overflows, even where an axis is empty.
_LARGEST_SHAPE = 2**60


@dataclass(frozen=True)
class Parts:
    """A record taken apart.

    Attributes
    ----------
    tensors
        The record's tensors by their path, as in ``weights`` or ``components/0``.
    structure
        JSON: the record with every tensor replaced by its path.
    """

    tensors: Mapping[str, Tensor]
    structure: str


@dataclass(frozen=True)
class Flat:
    """A record as one array, the cheapest thing to send.

    Attributes
    ----------
    vector
        All tensors one after the other, float32 of shape (d,).
    layout
        JSON: the record's structure, and path and shape of each tensor in order.
    """

    vector: Tensor
    layout: str


def take_apart(record: object) -> Parts:
    """Return the tensors and the structure of a frozen dataclass.

    Raises
    ------
    CodecError
        If a field is neither a float32 tensor nor a plain value nor a tuple, dict or
        dataclass of such.
    """
    tensors: dict[str, Tensor] = {}
    structure = _describe(record, "", tensors)
    return Parts(tensors, json.dumps(structure, separators=(",", ":")))


def put_together(record_type: type[R], parts: Parts) -> R:
    """Return the record of ``record_type`` that ``parts`` were made from.

    Raises
    ------
    CodecError
        If the parts are of another record or incomplete, or a field is not what its
        type hint says.
    """
    return _rebuilt(record_type, _parse(parts.structure), parts.tensors)


def flatten(record: object) -> Flat:
    """Return ``record`` as one float32 vector and a JSON layout.

    The vector of a record of one tensor has that tensor's memory.
    """
    parts = take_apart(record)
    pieces = [tensor.reshape(-1) for tensor in parts.tensors.values()]
    vector = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0), *pieces])
    shapes = {path: list(tensor.shape) for path, tensor in parts.tensors.items()}
    layout = {"structure": json.loads(parts.structure), "shapes": shapes}
    return Flat(vector, json.dumps(layout, separators=(",", ":")))


def unflatten(record_type: type[R], flat: Flat) -> R:
    """Return the record that ``flat`` was made from, its tensors as in `canonical`.

    A record of one tensor keeps the memory of ``flat.vector``, which is as torch
    allocates it.

    Raises
    ------
    CodecError
        If the vector is not as long as the layout says, or of another record, or a
        field is not what its type hint says. Nothing else is raised, whatever arrived.
    """
    structure, shapes = _read_layout(flat.layout)
    lengths = [math.prod(shape) for shape in shapes.values()]
    if flat.vector.dtype != torch.float32 or flat.vector.shape != (sum(lengths),):
        raise CodecError(
            f"expected an array of {sum(lengths)} numbers, found "
            f"{flat.vector.numel()}; the message is incomplete or of another layout"
        )
    stops = itertools.accumulate(lengths)
    pieces = {
        path: flat.vector[stop - length : stop].view(shape)
        for (path, shape), length, stop in zip(
            shapes.items(), lengths, stops, strict=True
        )
    }
    tensors = {
        path: piece if len(pieces) == 1 else _copied(piece)
        for path, piece in pieces.items()
    }
    return _rebuilt(record_type, structure, tensors)


def canonical(record: R) -> R:
    """Return ``record`` with its tensors copied: contiguous, each in memory of its own.

    Sums and products may end in other bits for another layout or alignment of the same
    numbers. What was computed here is made the same as what came over a wire or from
    a file, so that none of it shows in the results.
    """
    parts = take_apart(record)
    copies = {name: _copied(tensor) for name, tensor in parts.tensors.items()}
    return put_together(type(record), Parts(copies, parts.structure))


def fingerprint(record: object) -> str:
    """Return the SHA-256 of a record: its structure and every bit of its tensors."""
    parts = take_apart(record)
    digest = hashlib.sha256(parts.structure.encode())
    for path, tensor in parts.tensors.items():
        digest.update(f"{path}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def is_same(one: object, other: object) -> bool:
    """Return whether two records hold the very same tensors and equal values."""
    if one is other:
        return True
    first, second = take_apart(one), take_apart(other)
    return first.structure == second.structure and all(
        _same_memory(tensor, second.tensors[name])
        for name, tensor in first.tensors.items()
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number in ``tensor`` is NaN or infinite."""
    # The sum is far cheaper; where it overflows, every number is looked at.
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _describe(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise CodecError(f"{path}: expected float32, found {value.dtype}")
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        items = enumerate(value)
        return {"tuple": [_describe(v, f"{path}/{i}", tensors) for i, v in items]}
    if isinstance(value, Mapping):
        entries = value.items()
        return {"dict": {k: _describe(v, f"{path}/{k}", tensors) for k, v in entries}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        prefix = f"{path}/" if path else ""
        fields = {
            field.name: _describe(
                getattr(value, field.name), f"{prefix}{field.name}", tensors
            )
            for field in dataclasses.fields(value)
        }
        return {"record": type(value).__name__, "fields": fields}
    raise CodecError(f"{path}: a {type(value).__name__} cannot be sent or stored")


def _rebuilt(record_type: type[R], structure: Any, tensors: Mapping[str, Tensor]) -> R:
    record: R = rebuild(record_type, structure, tensors)
    return record


def _read_layout(text: str) -> tuple[Any, dict[str, list[int]]]:
    """Return the structure, and the shapes of its tensors by their path."""
    layout = _parse(text)
    shapes = layout.get("shapes") if isinstance(layout, dict) else None
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise CodecError("expected the shapes of a record's tensors, found none")
    return layout.get("structure"), shapes


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= _MOST_AXES
        and all(type(size) is int and size >= 0 for size in shape)
        and math.prod(max(size, 1) for size in shape) <= _LARGEST_SHAPE
    )


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"expected JSON, found something else: {error}") from error
