"""Describe settings dataclasses: types, ranges, defaults and meanings.

The reference of the documentation and ``knnper list`` are generated from it.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

_TYPES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}
_SIGNS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


@dataclass(frozen=True)
class SettingDoc:
    """The description of a field of a settings dataclass.

    Attributes
    ----------
    key
        Its name in a file.
    kind
        Its type and range; literal values are in backticks.
    default
        As in a file; None for a field without a default.
    meaning
        From the docstring; empty if it has no entry.
    inner
        The possible settings dataclasses of the value, each with its notation in a
        file, such as ``: {name: factory}``; empty for plain values.
    """

    key: str
    kind: str
    default: str | None
    meaning: str
    inner: tuple[tuple[str, type], ...] = ()


def documented(settings_type: Any) -> tuple[str, dict[str, str]]:
    """Return a class's docstring without its fields, and the meaning of each field."""
    about, _, attributes = (inspect.getdoc(settings_type) or "").partition(
        "\nAttributes\n----------\n"
    )
    meanings: dict[str, str] = {}
    for base in reversed(settings_type.__mro__[1:]):
        if dataclasses.is_dataclass(base):
            meanings |= documented(base)[1]
    for names, text in re.findall(r"^(\S.*)\n((?:[ \t]+.*\n?|\n)+)", attributes, re.M):
        meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return about.strip(), meanings


def setting_docs(settings_type: Any) -> Iterator[SettingDoc]:
    """Yield the fields of a settings dataclass, without ``name``, which selects it."""
    meanings = documented(settings_type)[1]
    hints = get_type_hints(settings_type, include_extras=True)
    for field in dataclasses.fields(settings_type):
        if field.name == "name":
            continue
        hint = hints[field.name]
        yield SettingDoc(
            field.name,
            kind_of(hint),
            _default(field),
            meanings.get(field.name, ""),
            tuple((_choice(member), member) for member in _dataclasses_in(hint)),
        )


def kind_of(annotation: Any) -> str:
    """Return the type of a setting, with its range, in words."""
    if get_origin(annotation) is Annotated:
        bare, *extras = get_args(annotation)
        rules = [
            rule
            for extra in extras
            if isinstance(extra, FieldInfo)
            for rule in extra.metadata
        ]
        return _with_range(kind_of(bare), {type(rule): rule for rule in rules})
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(kind_of, get_args(annotation))))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of: {kind_of(get_args(annotation)[0])}"
    return _TYPES.get(annotation, "mapping")


def _with_range(name: str, rules: Mapping[type, Any]) -> str:
    if MinLen in rules:
        return f"{name}, at least {rules[MinLen].min_length}"
    bounds = [
        f"{sign} {getattr(rules[rule], key):g}"
        for rule, (sign, key) in _SIGNS.items()
        if rule in rules
    ]
    return " ".join([name, ", ".join(bounds)]).strip()


def _default(field: "dataclasses.Field[Any]") -> str | None:
    if field.default is not dataclasses.MISSING:
        value = to_jsonable_python(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        initial = field.default_factory()
        value = {"name": initial.name} if hasattr(initial, "name") else {}
        if not dataclasses.is_dataclass(initial):
            value = to_jsonable_python(initial)
    else:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace('"', "")


def _dataclasses_in(annotation: Any) -> list[type]:
    if dataclasses.is_dataclass(annotation):
        return [annotation] if isinstance(annotation, type) else []
    return [member for part in get_args(annotation) for member in _dataclasses_in(part)]


def _choice(member: type) -> str:
    """Return the notation by which a file selects these settings among others."""
    named = get_type_hints(member).get("name")
    return f": {{name: {get_args(named)[0]}}}" if named else ""
