"""What the table of a settings dataclass says on a page."""

import dataclasses
import json
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python


def described(annotation: Any) -> str:
    """Return the type of a setting as the page writes it."""
    if get_origin(annotation) is Annotated:
        bare, *extras = get_args(annotation)
        rules = [
            rule
            for extra in extras
            if isinstance(extra, FieldInfo)
            for rule in extra.metadata
        ]
        return with_range(bare, rules)
    if get_origin(annotation) in (Union, UnionType):
        return unions(get_args(annotation))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        return f"list: {described(get_args(annotation)[0])}"
    if dataclasses.is_dataclass(annotation):
        return "mapping"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names[annotation]


def unions(members: tuple[Any, ...]) -> str:
    if all(dataclasses.is_dataclass(member) for member in members):
        return "mapping"
    value, other = members
    return f"{described(value)}, or {'null' if other is NoneType else described(other)}"


def with_range(bare: Any, rules: list[Any]) -> str:
    name = described(bare)
    bounds = {type(rule): rule for rule in rules}
    if MinLen in bounds:
        least = f"of at least {bounds[MinLen].min_length}"
        if bare is str:
            return f"{name} {least} character"
        return name.replace("list", f"list {least}")
    if Le in bounds or Lt in bounds:
        low = f"[{bounds[Ge].ge}" if Ge in bounds else f"({bounds[Gt].gt}"
        high = f"{bounds[Le].le}]" if Le in bounds else f"{bounds[Lt].lt})"
        return f"{name} in {low}, {high}"
    if Ge in bounds:
        return f"{name} ≥ {bounds[Ge].ge}"
    return f"{name} > {bounds[Gt].gt}" if Gt in bounds else name


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a setting as the page writes it."""
    if field.default_factory is not dataclasses.MISSING:
        plain = abridged(field.default_factory())
    elif field.default is not dataclasses.MISSING:
        plain = to_jsonable_python(field.default)
    else:
        return "*required*"
    text = plain if isinstance(plain, str) else json.dumps(plain)
    return f"`{text.replace(chr(34), '')}`"


def abridged(settings: Any) -> dict[str, str]:
    """Return what has to be written for default settings: at most their name."""
    return {"name": settings.name} if hasattr(settings, "name") else {}


def expected_rows(settings_type: Any) -> dict[str, tuple[str, str]]:
    hints = get_type_hints(settings_type, include_extras=True)
    return {
        field.name: (described(hints[field.name]), default_of(field))
        for field in dataclasses.fields(settings_type)
        if field.name != "name"
    }
