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

# Integers are accepted, unchanged, for fields of floats.
_PLAIN: Mapping[type, tuple[type | tuple[type, ...], str]] = {
    types.NoneType: (types.NoneType, "nothing"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "text"),
}
_MOST_AXES = 16

# Beyond it, what torch computes of a shape overflows, even where an axis is empty.
_LARGEST_SHAPE = 2**60
_SCALARS = (str, bool, int, float)


@dataclass(frozen=True)
class _Described:
    """The description of a value and its path in the record."""

    described: Any
    path: str

    def wrong(self, expected: str) -> CodecError:
        type_name = type(self.described).__name__
        place = self.path or "record"
        return CodecError(f"{place}: expected {expected}, found a {type_name}")

    def part(self, name: str, expected: type) -> Any:
        """Return the entry ``name`` of a description."""
        parts = self.described if isinstance(self.described, dict) else {}
        part = parts.get(name)
        if not isinstance(part, expected):
            raise self.wrong(f"a {name}")
        return part

    def inside(self, name: str, described: Any) -> "_Described":
        return _Described(described, f"{self.path}/{name}" if self.path else name)


@dataclass(frozen=True)
class _TensorPool:
    """The tensors of a record, and those that its fields have used so far.

    Trying an alternative of a union does not copy them: a peer chooses the number of
    tensors and of union values, so a copy would cost their product.
    """

    tensors: Mapping[str, Tensor]
    used: dict[str, None] = field(default_factory=dict)  # in order

    def take(self, path: str) -> Tensor | None:
        """Take a tensor that no field has used; None if there is none."""
        if path in self.used or path not in self.tensors:
            return None
        self.used[path] = None
        return self.tensors[path]

    def give_back(self, num_to_keep: int) -> None:
        """Free all used tensors but the first ``num_to_keep``."""
        while len(self.used) > num_to_keep:
            self.used.popitem()


def plain_fields(record_type: type[R], values: Mapping[str, Any] | None) -> R:
    """Build a dataclass from ``values`` and check each against its type hint."""
    fields = {"record": record_type.__name__, "fields": dict(values or {})}
    record: R = _value(record_type, _Described(fields, ""), _TensorPool({}))
    return record


def _value(hint: Any, item: _Described, pool: _TensorPool) -> Any:
    if isinstance(hint, type):
        if hint in _PLAIN:
            return _plain(hint, item)
        if hint is Tensor:
            return _tensor(item, pool)
        if dataclasses.is_dataclass(hint):
            return _record(hint, item, pool)
    of_parts = _OF_PARTS.get(typing.get_origin(hint))
    if of_parts is None:
        raise CodecError(
            f"{item.path}: a field of type {hint} cannot be sent or stored"
        )
    return of_parts(typing.get_args(hint), item, pool)


def _plain(hint: type, item: _Described) -> Any:
    value, (kinds, expected) = item.described, _PLAIN[hint]
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise item.wrong(expected)
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise CodecError(f"{item.path}: expected an integer of at most 64 bits")
    return _writable(value, item.path) if isinstance(value, str) else value


def _writable(text: str, path: str) -> str:
    """Return ``text``; half a character can be escaped in JSON, and not be written."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"{path}: expected Unicode text: {error}") from error
    return text


def _tensor(item: _Described, pool: _TensorPool) -> Tensor:
    path = item.part("tensor", str)
    tensor = pool.take(path) if path == item.path else None
    if tensor is None:
        raise CodecError(f"the tensor {item.path!r} is missing")
    if tensor.dtype != torch.float32:
        raise CodecError(f"{item.path}: expected float32, found {tensor.dtype}")
    return tensor


def _list(hints: tuple[Any, ...], item: _Described, pool: _TensorPool) -> list[Any]:
    if not isinstance(item.described, list):
        raise item.wrong("a list")
    return [_value(hints[0], item.inside("-", entry), pool) for entry in item.described]


def _tuple(
    hints: tuple[Any, ...], item: _Described, pool: _TensorPool
) -> tuple[Any, ...]:
    items = item.part("tuple", list)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(items)
    if len(items) != len(hints):
        raise CodecError(
            f"{item.path}: expected {len(hints)} items, found {len(items)}"
        )
    pairs = enumerate(zip(hints, items, strict=True))
    return tuple(_value(h, item.inside(str(i), entry), pool) for i, (h, entry) in pairs)


def _dict(
    hints: tuple[Any, ...], item: _Described, pool: _TensorPool
) -> dict[str, Any]:
    entries = item.part("dict", dict)
    return {
        _writable(name, item.path): _value(hints[1], item.inside(name, entry), pool)
        for name, entry in entries.items()
    }


def _one_of(hints: tuple[Any, ...], item: _Described, pool: _TensorPool) -> Any:
    problems: list[str] = []
    for hint in hints:
        num_used = len(pool.used)
        try:
            return _value(hint, item, pool)
        except CodecError as error:
            problems.append(str(error))
            pool.give_back(num_used)
    raise CodecError("; or ".join(problems))


def _literal(
    values: tuple[Any, ...],
    item: _Described,
    pool: _TensorPool,  # noqa: ARG001
) -> Any:
    for value in values:
        if type(value) is type(item.described) and value == item.described:
            return value
    raise item.wrong(f"one of {', '.join(map(repr, values))}")


_OF_PARTS: Mapping[Any, Callable[[tuple[Any, ...], _Described, _TensorPool], Any]] = {
    list: _list,
    tuple: _tuple,
    dict: _dict,
    collections.abc.Mapping: _dict,
    typing.Union: _one_of,
    types.UnionType: _one_of,
    Literal: _literal,
}


def _record(record_type: type, item: _Described, pool: _TensorPool) -> Any:
    name = item.part("record", str)
    if name != record_type.__name__:
        raise CodecError(
            f"expected a {record_type.__name__}, found a {name}; {_OTHER_VERSIONS}"
        )
    hints = _field_hints(record_type)
    fields: dict[str, Any] = item.part("fields", dict)
    unknown = sorted(fields.keys() - hints.keys())
    if unknown:
        names = ", ".join(unknown)
        raise CodecError(f"a {name} has no {names}; {_OTHER_VERSIONS}")
    values = {
        key: _value(hints[key], item.inside(key, entry), pool)
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
    """Rebuild the record of ``record_type`` from `take_apart`'s result."""
    return _build_record(record_type, _parse(parts.structure), parts.tensors)


def flatten(record: object) -> Flat:
    """Return ``record`` as one float32 vector and a JSON layout."""
    structure, tensors = _apart(record)
    pieces = [tensor.reshape(-1) for tensor in tensors.values()]
    vector = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0), *pieces])
    shapes = {path: list(tensor.shape) for path, tensor in tensors.items()}
    layout = {"structure": structure, "shapes": shapes}
    return Flat(vector, json.dumps(layout, separators=(",", ":")))


def unflatten(record_type: type[R], flat: Flat) -> R:
    """Rebuild the record from `flatten`'s result, its tensors as in `canonical`.

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
    return _build_record(record_type, structure, tensors)


def canonical(record: R) -> R:
    """Return ``record`` with contiguous copies of its tensors, each in separate memory.

    Sums and products may differ in their last bits for another layout or alignment of
    the same numbers. The copy has the layout of records from a wire or a file, so that
    results do not depend on where a record came from.
    """
    structure, tensors = _apart(record)
    copies = {name: _copied(tensor) for name, tensor in tensors.items()}
    return _build_record(type(record), structure, copies)


def fingerprint(record: object) -> str:
    """Return the SHA-256 of a record: its structure and every bit of its tensors.

    Checkpoints are verified by it, and exported models identified. It depends on the
    names of classes and fields, so renaming one changes it.
    """
    parts = take_apart(record)
    digest = hashlib.sha256(parts.structure.encode())
    for path, tensor in parts.tensors.items():
        digest.update(f"{path}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def is_same(first: object, second: object) -> bool:
    """Return whether two records hold the very same tensors and equal values."""
    if first is second:
        return True

    def memory(tensor: Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride()

    structure, tensors = _apart(first)
    other_structure, others = _apart(second)
    return structure == other_structure and all(
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
    if isinstance(value, _SCALARS):  # subclasses, such as NumPy's float64
        return next(kind for kind in _SCALARS if isinstance(value, kind))(value)
    if isinstance(value, tuple):
        items = enumerate(value)
        return {"tuple": [_describe(v, f"{path}/{i}", tensors) for i, v in items]}
    if isinstance(value, Mapping):
        entries = value.items()
        return {"dict": {k: _describe(v, f"{path}/{k}", tensors) for k, v in entries}}
    raise CodecError(f"{path}: a {type(value).__name__} cannot be sent or stored")


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None where it is none."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _build_record(
    record_type: type[R], structure: Any, tensors: Mapping[str, Tensor]
) -> R:
    """Build a record; reject tensors that none of its fields has."""
    pool = _TensorPool(tensors)
    record: R = _value(record_type, _Described(structure, ""), pool)
    if unused := tensors.keys() - pool.used.keys():
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
    """Return whether a shape that a peer has sent is a valid shape of a tensor."""
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
