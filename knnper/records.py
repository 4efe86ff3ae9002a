"""Records to tensors and text, and back: the one encoding used on wire and disk."""

import collections.abc
import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from knnper.errors import CodecError, KnnPerError

R = TypeVar("R")
_OTHER_VERSIONS = "the two sides run different versions"
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class _Found:
    """A described value, and where it stands in its record."""

    described: Any
    path: str

    def wrong(self, expected: str) -> CodecError:
        found = type(self.described).__name__
        place = self.path or "record"
        return CodecError(f"{place}: expected {expected}, found a {found}")

    def part(self, name: str, expected: type) -> Any:
        """Return what is under ``name`` of a description."""
        parts = self.described if isinstance(self.described, dict) else {}
        part = parts.get(name)
        if not isinstance(part, expected):
            raise self.wrong(f"a {name}")
        return part

    def inside(self, name: str, described: Any) -> "_Found":
        return _Found(described, f"{self.path}/{name}" if self.path else name)


@dataclass(frozen=True)
class _Left:
    """Tensors of a record, and which of them its fields have taken so far.

    They are not copied to try an alternative of a union: a peer chooses how many
    tensors and how many values of a union there are, and each would cost the other.
    """

    tensors: Mapping[str, Tensor]
    taken: dict[str, None] = field(default_factory=dict)  # in order

    def take(self, path: str) -> Tensor | None:
        """Return a tensor that no field has yet; None if there is none."""
        if path in self.taken or path not in self.tensors:
            return None
        self.taken[path] = None
        return self.tensors[path]

    def give_back(self, num_kept: int) -> None:
        """Forget all that were taken but the first ``num_kept``."""
        while len(self.taken) > num_kept:
            self.taken.popitem()


def plain_fields(record_type: type[R], given: Mapping[str, Any] | None) -> R:
    """Return the dataclass whose fields are ``given``, each as its type hint says."""
    fields = {"record": record_type.__name__, "fields": dict(given or {})}
    record: R = _value(record_type, _Found(fields, ""), _Left({}))
    return record


# What was an int when it was taken apart stays one where a float is expected.
_PLAIN: Mapping[type, tuple[type | tuple[type, ...], str]] = {
    types.NoneType: (types.NoneType, "nothing"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "text"),
}


def _value(hint: Any, found: _Found, left: _Left) -> Any:
    if isinstance(hint, type):
        if hint in _PLAIN:
            return _plain(hint, found)
        if hint is Tensor:
            return _tensor(found, left)
        if dataclasses.is_dataclass(hint):
            return _record(hint, found, left)
    of_parts = _OF_PARTS.get(typing.get_origin(hint))
    if of_parts is None:
        raise CodecError(
            f"{found.path}: a field of type {hint} cannot be sent or stored"
        )
    return of_parts(typing.get_args(hint), found, left)


def _plain(hint: type, found: _Found) -> Any:
    value, (kinds, expected) = found.described, _PLAIN[hint]
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise found.wrong(expected)
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise CodecError(f"{found.path}: expected an integer of at most 64 bits")
    return _writable(value, found.path) if isinstance(value, str) else value


def _writable(text: str, path: str) -> str:
    """Return ``text``; half a character can be escaped in JSON, and not be written."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"{path}: expected Unicode text: {error}") from error
    return text


def _tensor(found: _Found, left: _Left) -> Tensor:
    path = found.part("tensor", str)
    tensor = left.take(path) if path == found.path else None
    if tensor is None:
        raise CodecError(f"the tensor {found.path!r} is missing")
    if tensor.dtype != torch.float32:
        raise CodecError(f"{found.path}: expected float32, found {tensor.dtype}")
    return tensor


def _list(hints: tuple[Any, ...], found: _Found, left: _Left) -> list[Any]:
    if not isinstance(found.described, list):
        raise found.wrong("a list")
    return [_value(hints[0], found.inside("-", item), left) for item in found.described]


def _tuple(hints: tuple[Any, ...], found: _Found, left: _Left) -> tuple[Any, ...]:
    items = found.part("tuple", list)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(items)
    if len(items) != len(hints):
        raise CodecError(
            f"{found.path}: expected {len(hints)} items, found {len(items)}"
        )
    pairs = enumerate(zip(hints, items, strict=True))
    return tuple(_value(h, found.inside(str(i), item), left) for i, (h, item) in pairs)


def _dict(hints: tuple[Any, ...], found: _Found, left: _Left) -> dict[str, Any]:
    entries = found.part("dict", dict)
    return {
        _writable(name, found.path): _value(hints[1], found.inside(name, entry), left)
        for name, entry in entries.items()
    }


def _one_of(hints: tuple[Any, ...], found: _Found, left: _Left) -> Any:
    problems: list[str] = []
    for hint in hints:
        num_taken = len(left.taken)
        try:
            return _value(hint, found, left)
        except CodecError as error:
            problems.append(str(error))
            left.give_back(num_taken)
    raise CodecError("; or ".join(problems))


def _literal(
    values: tuple[Any, ...],
    found: _Found,
    left: _Left,  # noqa: ARG001
) -> Any:
    for value in values:
        if type(value) is type(found.described) and value == found.described:
            return value
    raise found.wrong(f"one of {', '.join(map(repr, values))}")


_OF_PARTS: Mapping[Any, Callable[[tuple[Any, ...], _Found, _Left], Any]] = {
    list: _list,
    tuple: _tuple,
    dict: _dict,
    collections.abc.Mapping: _dict,
    typing.Union: _one_of,
    types.UnionType: _one_of,
    Literal: _literal,
}


def _record(record_type: type, found: _Found, left: _Left) -> Any:
    name = found.part("record", str)
    if name != record_type.__name__:
        raise CodecError(
            f"expected a {record_type.__name__}, found a {name}; {_OTHER_VERSIONS}"
        )
    hints = _field_hints(record_type)
    fields: dict[str, Any] = found.part("fields", dict)
    unknown = sorted(fields.keys() - hints.keys())
    if unknown:
        names = ", ".join(unknown)
        raise CodecError(f"a {name} has no {names}; {_OTHER_VERSIONS}")
    values = {
        key: _value(hints[key], found.inside(key, entry), left)
        for key, entry in fields.items()
    }
    try:
        return record_type(**values)
    except (TypeError, ValueError, KnnPerError) as error:
        raise CodecError(f"{error}; {_OTHER_VERSIONS}") from error


@functools.cache
def _field_hints(record_type: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(record_type)}


_MOST_AXES = 16

# Beyond it, what torch computes of a shape overflows, even where an axis is empty.
_LARGEST_SHAPE = 2**60


@dataclass(frozen=True)
class Parts:
    """A record taken apart."""

    tensors: Mapping[str, Tensor]
    structure: str


@dataclass(frozen=True)
class Flat:
    """A record as one array, the cheapest thing to send."""

    vector: Tensor  # all tensors one after the other, float32 of shape (d,)
    # JSON: the record's structure, and path and shape of each tensor in order.
    layout: str


def take_apart(record: object) -> Parts:
    """Return the tensors and the structure of a frozen dataclass."""
    structure, tensors = _apart(record)
    return Parts(tensors, json.dumps(structure, separators=(",", ":")))


def tensors_of(record: object) -> Mapping[str, Tensor]:
    """Return the tensors of a frozen dataclass, by path."""
    return _apart(record)[1]


def put_together(record_type: type[R], parts: Parts) -> R:
    """Return the record of ``record_type`` that ``parts`` were made from."""
    return _rebuilt(record_type, _parse(parts.structure), parts.tensors)


def flatten(record: object) -> Flat:
    """Return ``record`` as one float32 vector and a JSON layout."""
    structure, tensors = _apart(record)
    pieces = [tensor.reshape(-1) for tensor in tensors.values()]
    vector = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0), *pieces])
    shapes = {path: list(tensor.shape) for path, tensor in tensors.items()}
    layout = {"structure": structure, "shapes": shapes}
    return Flat(vector, json.dumps(layout, separators=(",", ":")))


def unflatten(record_type: type[R], flat: Flat) -> R:
    """Return the record that ``flat`` was made from, its tensors as in `canonical`.

    A record of one tensor keeps the memory of ``flat.vector``, which is as torch
    allocates it.
    """
    structure, shapes = _read_layout(flat.layout)
    lengths = [math.prod(shape) for shape in shapes.values()]
    if flat.vector.dtype != torch.float32 or flat.vector.shape != (sum(lengths),):
        raise CodecError(
            f"expected an array of {sum(lengths)} numbers, found "
            f"{flat.vector.numel()}; the message is incomplete or of another layout"
        )
    tensors = {
        path: piece.view(shape)
        for (path, shape), piece in zip(
            shapes.items(), torch.split(flat.vector, lengths), strict=True
        )
    }
    if len(tensors) > 1:
        tensors = {path: _copied(piece) for path, piece in tensors.items()}
    return _rebuilt(record_type, structure, tensors)


def canonical(record: R) -> R:
    """Return ``record`` with its tensors copied: contiguous, each in memory of its own.

    Sums and products may end in other bits for another layout or alignment of the same
    numbers. What was computed here is made the same as what came over a wire or from
    a file, so that none of it shows in the results.
    """
    structure, tensors = _apart(record)
    copies = {name: _copied(tensor) for name, tensor in tensors.items()}
    return _rebuilt(type(record), structure, copies)


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

    def memory(tensor: Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride()

    (first, tensors), (second, others) = _apart(one), _apart(other)
    return first == second and all(
        memory(tensor) == memory(others[name]) for name, tensor in tensors.items()
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number in ``tensor`` is NaN or infinite."""
    # The sum is far cheaper; where it overflows, every number is looked at.
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _apart(record: object) -> tuple[Any, dict[str, Tensor]]:
    """Return structure and tensors of a record."""
    tensors: dict[str, Tensor] = {}
    return _describe(record, "", tensors), tensors


def _describe(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise CodecError(f"{path}: expected float32, found {value.dtype}")
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or type(value) in _SCALARS:
        return value
    names = _field_names(value.__class__)
    if names is not None:
        prefix = f"{path}/" if path else ""
        fields = {
            name: _describe(getattr(value, name), f"{prefix}{name}", tensors)
            for name in names
        }
        return {"record": type(value).__name__, "fields": fields}
    if isinstance(value, _SCALARS):  # of NumPy's, say
        return next(kind for kind in _SCALARS if isinstance(value, kind))(value)
    if isinstance(value, tuple):
        items = enumerate(value)
        return {"tuple": [_describe(v, f"{path}/{i}", tensors) for i, v in items]}
    if isinstance(value, Mapping):
        entries = value.items()
        return {"dict": {k: _describe(v, f"{path}/{k}", tensors) for k, v in entries}}
    raise CodecError(f"{path}: a {type(value).__name__} cannot be sent or stored")


_SCALARS = (str, bool, int, float)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None where it is none."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _rebuilt(record_type: type[R], structure: Any, tensors: Mapping[str, Tensor]) -> R:
    left = _Left(tensors)
    record: R = _value(record_type, _Found(structure, ""), left)
    if unused := tensors.keys() - left.taken.keys():
        names = ", ".join(sorted(unused))
        raise CodecError(f"no field has the tensors {names}; {_OTHER_VERSIONS}")
    return record


def _read_layout(text: str) -> tuple[Any, dict[str, list[int]]]:
    """Return the structure, and the shapes of its tensors by their path."""
    layout = _parse(text)
    shapes = layout.get("shapes") if isinstance(layout, dict) else None
    if not isinstance(shapes, dict) or not all(map(is_shape, shapes.values())):
        raise CodecError("expected the shapes of a record's tensors, found none")
    return layout.get("structure"), shapes


def is_shape(shape: object) -> bool:
    """Return whether a tensor may have the shape that somebody says it has."""
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
