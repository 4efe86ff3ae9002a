"""From a plain mapping to a settings dataclass, with all that is wrong in plain words.

Pydantic validates the dataclasses; its errors are put into the words of this project.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from knnper.config.errors import Problem
from knnper.config.sections import Settings
from knnper.config.suggestions import alternatives, nearest, shown

S = TypeVar("S", bound=Settings)

# By pydantic's name of an error; the braces are filled from the error's context.
_EXPECTATIONS = MappingProxyType(
    {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "dataclass_type": "a mapping; write {{}} for the defaults",
        "none_required": "null",
        "finite_number": "a finite number",
        "too_short": "a list of at least {min_length}",
        "too_long": "a list of at most {max_length}",
        "string_too_short": "text of at least {min_length} characters",
        "string_too_long": "text of at most {max_length} characters",
        "string_pattern_mismatch": "text that matches {pattern}",
    }
)
# By the name of a limit, in pydantic as in its errors.
_LIMITS = MappingProxyType(
    {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
)


def parse_settings(
    settings_type: type[S],
    value: object,
    place: str,
    problems: list[Problem],
    hint: str = "",
) -> S | None:
    """Return ``value`` as ``settings_type``, or None after adding to ``problems``.

    Parameters
    ----------
    settings_type
        A frozen dataclass with types that pydantic understands.
    value
        What the section holds: plain values only.
    place
        The section, as in ``training``; empty for a whole file.
    problems
        Gets one entry for each setting that is wrong.
    hint
        Added to what is said of unknown keys.
    """
    try:
        # mypy takes the hash of a class for that of its instances.
        adapter = _adapter(settings_type)  # type: ignore[arg-type]
        parsed: S = adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems.extend(_translate(settings_type, details, place, hint))
        return None
    return parsed


@functools.cache
def _adapter(settings_type: type[Settings]) -> TypeAdapter[Any]:
    """Return what validates a type; making one takes longer than using it."""
    return TypeAdapter(settings_type)


def _translate(
    settings_type: type[Settings],
    details: Sequence[ErrorDetails],
    place: str,
    hint: str,
) -> Iterable[Problem]:
    """Yield one problem a place: each member of a union has its own complaint.

    A list is not called too short as well when only its items are wrong.
    """
    messages: dict[str, list[str]] = {}
    inner = {detail["loc"][:-1] for detail in details}
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in inner:
            continue
        keys, parent, annotation = _resolve(settings_type, detail["loc"])
        message = _message(detail, parent, annotation, hint)
        where = ".".join(key for key in (place, *keys) if key)
        messages.setdefault(where or "document", []).append(message)
    for where, found in messages.items():
        yield Problem(where, ", or ".join(dict.fromkeys(found)))


def _message(
    detail: ErrorDetails, parent: object, annotation: object, hint: str
) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        known = alternatives(str(detail["loc"][-1]), _field_names(parent))
        return f"unknown setting; {known}{hint}"
    if kind == "missing":
        return "expected a value, found nothing; there is no default"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        return "expected a key 'name' that says which one is meant, found none"
    found = shown(detail["input"])
    if kind == "union_tag_invalid":
        known = alternatives(context["tag"], _quoted(context["expected_tags"]))
        return f"unknown name {context['tag']!r}; {known}"
    if kind == "literal_error":
        guess = nearest(str(detail["input"]), _quoted(context["expected"]))
        return f"found {found}, expected {context['expected']}; {guess}".rstrip("; ")
    expected = _expected(kind, context, annotation)
    if expected is None:
        return f"found {found}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    return f"found {found}, expected {expected}"


def _expected(kind: str, context: Mapping[str, Any], annotation: object) -> str | None:
    """Return what would be right; None for an error that has no words here."""
    if context.keys() & _LIMITS.keys():
        return f"a number {_range(annotation, context)}"
    words = _EXPECTATIONS.get(kind)
    return words and words.format(**context)


def _range(annotation: object, context: Mapping[str, Any]) -> str:
    """Return both ends of what a number may be, also the one that was not missed."""
    limits = {**_limits(annotation), **context}
    if limits.keys() == {"ge", "le"}:
        return f"from {limits['ge']:.12g} to {limits['le']:.12g}"
    return " and ".join(
        f"{words} {limits[name]:.12g}"
        for name, words in _LIMITS.items()
        if name in limits
    )


def _limits(annotation: object) -> dict[str, Any]:
    """Return the limits in an annotation, by their names in `_LIMITS`."""
    if get_origin(annotation) in (Union, UnionType):
        members = [one for one in get_args(annotation) if one is not NoneType]
        return _limits(members[0]) if len(members) == 1 else {}
    if get_origin(annotation) is not Annotated:
        return {}
    fields = [one for one in get_args(annotation) if isinstance(one, FieldInfo)]
    return {
        name: getattr(limit, name)
        for field in fields
        for limit in field.metadata
        for name in _LIMITS
        if hasattr(limit, name)
    }


def _quoted(text: str) -> list[str]:
    """Return what stands between single quotes in ``text``."""
    return text.split("'")[1::2]


def _field_names(annotation: object) -> list[str]:
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        return []
    return [field.name for field in dataclasses.fields(annotation)]


def _resolve(
    settings_type: type[Settings], location: Sequence[str | int]
) -> tuple[list[str], object, object]:
    """Return the keys in pydantic's ``location``, what holds the last, and its type.

    Pydantic puts the chosen member of a union into the location; no key in the file
    corresponds to it.
    """
    keys: list[str] = []
    here: object = settings_type
    parent = here
    for part in location:
        parent = _bare(here)
        here, is_key = _step(parent, part)
        if is_key:
            keys.append(str(part))
    return keys, parent, here


def _step(annotation: object, part: str | int) -> tuple[object, bool]:
    """Return the type of ``part`` of a value, and whether ``part`` is a key in it."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        hints: Mapping[str, object] = get_type_hints(annotation, include_extras=True)
        return hints.get(str(part)), True
    members = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        tagged = (one for one in members if getattr(one, "name", None) == part)
        return next(tagged, None), False
    elements = [member for member in members if member is not Ellipsis]
    return (elements[-1] if elements else None), True


def _bare(annotation: object) -> Any:
    """Return ``annotation`` without its ranges and without ``| None``."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [one for one in get_args(annotation) if one is not NoneType]
        return _bare(members[0]) if len(members) == 1 else annotation
    return annotation
