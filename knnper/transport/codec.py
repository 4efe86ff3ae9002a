"""Records to tensors and text, and back: the one encoding used on wire and disk."""

import dataclasses
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from knnper.config.errors import KnnPerError

R = TypeVar("R")


class CodecError(KnnPerError):
    """Something cannot be encoded, or what arrived is not what was expected."""


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
        If the parts are of another record or incomplete.
    """
    known = {found.__name__: found for found in _record_types(record_type)}
    record = _rebuild(_parse(parts.structure), parts.tensors, known)
    if not isinstance(record, record_type):
        raise CodecError(
            f"expected a {record_type.__name__}, found a {type(record).__name__}; "
            "the two sides run different methods or versions"
        )
    return record


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
        If the vector is not as long as the layout says, or of another record.
    """
    layout = _parse(flat.layout)
    shapes: dict[str, list[int]] = layout["shapes"]
    lengths = [math.prod(shape) for shape in shapes.values()]
    if sum(lengths) != flat.vector.numel():
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
    return put_together(record_type, Parts(tensors, json.dumps(layout["structure"])))


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


def _rebuild(
    described: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]
) -> Any:
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        path = described["tensor"]
        if path not in tensors:
            raise CodecError(f"the tensor {path!r} is missing")
        return tensors[path]
    if "tuple" in described:
        return tuple(_rebuild(item, tensors, known) for item in described["tuple"])
    if "dict" in described:
        entries = described["dict"].items()
        return {name: _rebuild(item, tensors, known) for name, item in entries}
    name = described["record"]
    if name not in known:
        raise CodecError(
            f"expected one of {', '.join(sorted(known))}, found a {name}; the two "
            "sides run different methods or versions"
        )
    fields = described["fields"].items()
    try:
        return known[name](**{key: _rebuild(v, tensors, known) for key, v in fields})
    except TypeError as error:
        raise CodecError(f"{error}; the two sides run different versions") from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CodecError(f"expected JSON, found something else: {error}") from error


def _record_types(record_type: type) -> Iterator[type]:
    """Yield ``record_type`` and every dataclass that its fields mention."""
    yield record_type
    for hint in typing.get_type_hints(record_type).values():
        for mentioned in _mentioned(hint):
            if isinstance(mentioned, type) and dataclasses.is_dataclass(mentioned):
                yield from _record_types(mentioned)


def _mentioned(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if not arguments:
        yield hint
    for argument in arguments:
        yield from _mentioned(argument)
