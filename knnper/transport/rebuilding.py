"""Values as JSON describes them, taken only if they are what a type hint says."""

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from knnper.config.errors import CodecError, KnnPerError

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


def rebuild(hint: Any, described: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``described`` stands for.

    Parameters
    ----------
    hint
        What it must be: Tensor, int, float, str, bool, None, a dataclass, or a tuple,
        a dict from strings, a union or a Literal of such.
    described
        As `knnper.transport.codec.take_apart` describes a value, read from JSON.
    tensors
        By the path of the field in which each stands; all of them must be used.

    Raises
    ------
    CodecError
        If it is anything else.
    """
    left = dict(tensors)
    value = _value(hint, _Found(described, ""), left)
    if left:
        names = ", ".join(sorted(left))
        raise CodecError(f"no field has the tensors {names}; {_OTHER_VERSIONS}")
    return value


def plain_fields(record_type: type[R], given: Mapping[str, Any] | None) -> R:
    """Return the dataclass whose fields are ``given``, each as its type hint says.

    Parameters
    ----------
    record_type
        Its fields are str, int, float, bool or lists of such.
    given
        The fields as they arrived; None if they did not.

    Raises
    ------
    CodecError
        If they are not these.
    """
    fields = {"record": record_type.__name__, "fields": dict(given or {})}
    record: R = _value(record_type, _Found(fields, ""), {})
    return record


def _value(hint: Any, found: _Found, left: dict[str, Tensor]) -> Any:
    plain = _PLAIN.get(hint) if isinstance(hint, type) else None
    if plain is not None:
        return plain(found)
    if hint is Tensor:
        return _tensor(found, left)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint, found, left)
    of_parts = _OF_PARTS.get(typing.get_origin(hint))
    if of_parts is None:
        raise CodecError(
            f"{found.path}: a field of type {hint} cannot be sent or stored"
        )
    return of_parts(typing.get_args(hint), found, left)


def _nothing(found: _Found) -> None:
    if found.described is not None:
        raise found.wrong("nothing")


def _truth(found: _Found) -> bool:
    if not isinstance(found.described, bool):
        raise found.wrong("true or false")
    return found.described


def _integer(found: _Found) -> int:
    value = found.described
    if isinstance(value, bool) or not isinstance(value, int):
        raise found.wrong("an integer")
    if abs(value) > _LARGEST_INTEGER:
        raise CodecError(f"{found.path}: expected an integer of at most 64 bits")
    return value


def _number(found: _Found) -> float:
    """Return a float; what was an int when it was taken apart stays one."""
    if isinstance(found.described, float):
        return found.described
    if not isinstance(found.described, int):
        raise found.wrong("a number")
    return _integer(found)


def _text(found: _Found) -> str:
    if not isinstance(found.described, str):
        raise found.wrong("text")
    return _writable(found.described, found.path)


_PLAIN: Mapping[type, Callable[[_Found], Any]] = {
    types.NoneType: _nothing,
    bool: _truth,
    int: _integer,
    float: _number,
    str: _text,
}


def _writable(text: str, path: str) -> str:
    """Return ``text``; half a character can be escaped in JSON, and not be written."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"{path}: expected Unicode text: {error}") from error
    return text


def _tensor(found: _Found, left: dict[str, Tensor]) -> Tensor:
    path = found.part("tensor", str)
    tensor = left.pop(path, None) if path == found.path else None
    if tensor is None:
        raise CodecError(f"the tensor {found.path!r} is missing")
    if tensor.dtype != torch.float32:
        raise CodecError(f"{found.path}: expected float32, found {tensor.dtype}")
    return tensor


def _list(hints: tuple[Any, ...], found: _Found, left: dict[str, Tensor]) -> list[Any]:
    if not isinstance(found.described, list):
        raise found.wrong("a list")
    return [_value(hints[0], found.inside("-", item), left) for item in found.described]


def _tuple(
    hints: tuple[Any, ...], found: _Found, left: dict[str, Tensor]
) -> tuple[Any, ...]:
    items = found.part("tuple", list)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(items)
    if len(items) != len(hints):
        raise CodecError(
            f"{found.path}: expected {len(hints)} items, found {len(items)}"
        )
    pairs = enumerate(zip(hints, items, strict=True))
    return tuple(_value(h, found.inside(str(i), item), left) for i, (h, item) in pairs)


def _dict(
    hints: tuple[Any, ...], found: _Found, left: dict[str, Tensor]
) -> dict[str, Any]:
    entries = found.part("dict", dict)
    return {
        _writable(name, found.path): _value(hints[1], found.inside(name, entry), left)
        for name, entry in entries.items()
    }


def _one_of(hints: tuple[Any, ...], found: _Found, left: dict[str, Tensor]) -> Any:
    problems: list[str] = []
    for hint in hints:
        remaining = dict(left)
        try:
            value = _value(hint, found, remaining)
        except CodecError as error:
            problems.append(str(error))
            continue
        for used in left.keys() - remaining.keys():
            del left[used]
        return value
    raise CodecError("; or ".join(problems))


def _literal(
    values: tuple[Any, ...],
    found: _Found,
    left: dict[str, Tensor],  # noqa: ARG001
) -> Any:
    for value in values:
        if type(value) is type(found.described) and value == found.described:
            return value
    raise found.wrong(f"one of {', '.join(map(repr, values))}")


_OF_PARTS: Mapping[Any, Callable[[tuple[Any, ...], _Found, dict[str, Tensor]], Any]] = {
    list: _list,
    tuple: _tuple,
    dict: _dict,
    collections.abc.Mapping: _dict,
    typing.Union: _one_of,
    types.UnionType: _one_of,
    Literal: _literal,
}


def _record(record_type: type, found: _Found, left: dict[str, Tensor]) -> Any:
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
