"""The settings engine: typed settings, choices by name, overrides and error messages.

A settings class is a frozen dataclass derived from `Settings`; pydantic validates the
values. All problems of a document are collected before it is rejected, each with its
place, the value found, the value expected and the nearest known name.
`knnper.experiment` defines the fields of an experiment with it.
"""

import copy
import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.reasons import Code, SafeReason
from knnper.yaml_text import parse_yaml

# Numbers of examples are at most this: a float holds every integer up to here.
LARGEST_COUNT = 2**53
# Values in messages are cut to this many characters.
LONGEST_VALUE = 60

_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_REFERENCE = re.compile(f"{_DOTTED}:{_DOTTED}")

# By pydantic's name of an error; the braces are filled from the error's context.
_EXPECTATIONS = {
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
# By the name of a limit, in pydantic as in its errors.
_LIMITS = {
    "gt": "greater than",
    "ge": "of at least",
    "lt": "less than",
    "le": "of at most",
}

# Types of settings fields. A name is one of letters, digits, ".", "_" and "-".
Name = Annotated[str, Field(pattern=f"^{_PATTERN}$")]
# ``module:attribute``
Reference = Annotated[str, Field(pattern=f"^{_DOTTED}:{_DOTTED}$")]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]  # [0, 1]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]  # (0, 1]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]  # [0, 1)


@dataclass(frozen=True)
class Settings:
    """Base of all settings dataclasses: frozen, strict types, no unknown keys."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


S = TypeVar("S", bound=Settings)
S_co = TypeVar("S_co", bound=Settings, covariant=True)
SettingsTypes = Mapping[str, type[Settings]]


@dataclass(frozen=True)
class Choice(Generic[S_co]):
    """An entry of the catalogue, or code of the user, with its settings."""

    # A name of the catalogue, as ``dirichlet``, or ``module:attribute`` of the user.
    name: str
    settings: S_co  # validated
    # The user's attribute; None for an entry of the catalogue.
    entry: Any = field(default=None, compare=False, repr=False)
    # SHA-256, in hexadecimal, of the user's source; empty for the catalogue.
    fingerprint: str = field(default="", repr=False)
    # Settings with this machine's replacements, if there are any; used for building.
    local: S_co | None = field(default=None, compare=False, repr=False)

    @property
    def metric_name(self) -> str:
        """Name of this metric in results: of the user's code, its attribute."""
        return metric_name(self.name)


def metric_name(name: str) -> str:
    """Return the name that a metric has in results."""
    return name.rpartition(":")[2]


@dataclass(frozen=True)
class Own:
    """Code of the user that an experiment names; see `knnper.own`."""

    entry: Any
    settings_type: type[Settings]
    fingerprint: str  # as in `Choice`
    file: str = ""  # path of the source
    folder: Path | None = None  # searched before the Python path

    def require(self, reference: str, expected: str) -> None:
        """Raise `OwnCodeError` unless the source has the fingerprint ``expected``."""
        if self.fingerprint != expected:
            raise OwnCodeError(
                f"{reference} differs on this machine: {self.file or 'its source'}, "
                "with the modules that it imports from its folder, has the fingerprint "
                f"{self.fingerprint[:12]}, expected {expected[:12] or 'none'}; bring "
                "the same files to all machines",
                reason=SafeReason(Code.OWN_CODE_DIFFERS),
            )


OpenOwn = Callable[[str, str, Path | None], Own]
"""``(section, reference, folder) -> Own``."""


def is_name(text: str) -> bool:
    """Return whether ``text`` is a `Name`."""
    return re.fullmatch(_PATTERN, text) is not None


def is_reference(name: object) -> bool:
    """Return whether ``name`` is ``module:attribute``; both may have dots."""
    return isinstance(name, str) and _REFERENCE.fullmatch(name) is not None


def one_of(known: Collection[str]) -> AfterValidator:
    """Return a validator that rejects names that are neither known nor references."""

    def checked(name: str) -> str:
        if name not in known and not is_reference(name):
            raise ValueError(f"unknown name {shown(name)}; {alternatives(name, known)}")
        return name

    return AfterValidator(checked)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the most similar known name, or "".

    Case is ignored: ``adamw`` is closer to ``AdamW`` than to ``Adam``.
    """
    names = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), list(names), n=1)
    return f"did you mean {names[matches[0]]!r}?" if matches else ""


def alternatives(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name and the list of all, for an error message."""
    names = sorted(known)
    everything = f"known: {', '.join(names)}" if names else "none are known here"
    return " ".join(filter(None, (nearest(name, names), everything)))


def shown(value: object) -> str:
    """Return ``value`` as it would be written in a file, cut to `LONGEST_VALUE`."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]}..."


def parse_settings(
    settings_type: type[S],
    value: object,
    place: str,
    problems: list[Problem],
    hint: str = "",
) -> S | None:
    """Return ``value`` as ``settings_type``, or None after adding to ``problems``.

    ``place`` is the dotted key of the value. ``hint`` is appended to the message about
    an unknown key.
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


# Building a validator takes longer than using it.
_adapter = functools.cache(TypeAdapter[Any])


def _translate(
    settings_type: type[Settings],
    details: Sequence[ErrorDetails],
    place: str,
    hint: str,
) -> Iterable[Problem]:
    """Yield one problem per place: each member of a union reports its own error."""
    messages: dict[str, list[str]] = {}
    inner = {detail["loc"][:-1] for detail in details}
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in inner:
            continue
        keys, parent = _resolve(settings_type, detail["loc"])
        message = _message(detail, parent, hint)
        where = ".".join(key for key in (place, *keys) if key)
        messages.setdefault(where or "document", []).append(message)
    for where, complaints in messages.items():
        yield Problem(where, ", or ".join(dict.fromkeys(complaints)))


def _message(detail: ErrorDetails, parent: Any, hint: str) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        names = [field.name for field in dataclasses.fields(parent)]
        return f"unknown setting; {alternatives(str(detail['loc'][-1]), names)}{hint}"
    if kind == "missing":
        return "expected a value, found nothing; there is no default"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        return "found no key 'name', expected one with the name of the entry"
    value = shown(detail["input"])
    if kind == "union_tag_invalid":
        known = alternatives(context["tag"], _quoted(context["expected_tags"]))
        return f"unknown name {context['tag']!r}; {known}"
    if kind == "literal_error":
        guess = nearest(str(detail["input"]), _quoted(context["expected"]))
        return f"found {value}, expected {context['expected']}; {guess}".rstrip("; ")
    for name, words in _LIMITS.items():
        if name in context:
            return f"found {value}, expected a number {words} {context[name]:.12g}"
    if kind in _EXPECTATIONS:
        return f"found {value}, expected {_EXPECTATIONS[kind].format(**context)}"
    return f"found {value}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _quoted(text: str) -> list[str]:
    """Return the parts of ``text`` between single quotes."""
    return text.split("'")[1::2]


def _resolve(
    settings_type: type[Settings], location: Sequence[str | int]
) -> tuple[list[str], Any]:
    """Return the keys in ``location`` (pydantic's), and the type of the last parent."""
    keys: list[str] = []
    annotation: object = settings_type
    parent: Any = annotation
    for part in location:
        parent = _bare(annotation)
        annotation, is_key = _step(parent, part)
        keys += [str(part)] * is_key
    return keys, parent


def _step(annotation: object, part: str | int) -> tuple[object, bool]:
    """Return the type of ``part`` of a value, and whether ``part`` is a key in it."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return get_type_hints(annotation, include_extras=True).get(str(part)), True
    members = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        tagged = (member for member in members if getattr(member, "name", None) == part)
        return next(tagged, None), False
    elements = [member for member in members if member is not Ellipsis]
    return (elements[-1] if elements else None), True


def _bare(annotation: object) -> Any:
    """Return ``annotation`` without its ranges and without ``| None``."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return _bare(members[0]) if len(members) == 1 else annotation
    return annotation


@dataclass(frozen=True)
class Override:
    """A setting from the command line that replaces the value of a file."""

    path: tuple[str, ...]
    value: Any


def parse_overrides(
    texts: Sequence[str], problems: list[Problem]
) -> tuple[Override, ...]:
    """Parse overrides, ``KEY=VALUE``, and add malformed texts to ``problems``."""
    overrides = []
    for text in texts:
        name, equals, value = text.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path):
            expected = "expected KEY=VALUE, as in training.num_rounds=50"
            problems.append(Problem("override", f"{expected}, found {shown(text)}"))
            continue
        try:
            overrides.append(Override(path, parse_yaml(value, text)))
        except ConfigError as error:
            reasons = "; ".join(problem.message for problem in error.problems)
            message = f"found {shown(value)}, expected a YAML value: {reasons}"
            problems.append(Problem(".".join(path), message))
    return tuple(overrides)


def with_overrides(source: str, overrides: Sequence[str]) -> str:
    """Return the name in errors of a document that overrides have changed."""
    return f"{source} with {', '.join(overrides)}" if overrides else source


def apply_overrides(
    document: Mapping[str, Any], overrides: Sequence[Override], problems: list[Problem]
) -> dict[str, Any]:
    """Return a copy of ``document`` with ``overrides`` applied in order."""
    result = copy.deepcopy(dict(document))
    for override in overrides:
        *above, last = override.path
        mapping = result
        for depth, part in enumerate(above, start=1):
            below = mapping.get(part)
            mapping[part] = below = {} if below is None else below
            if not isinstance(below, dict):
                section = ".".join(above[:depth])
                message = (
                    f"{section} is {shown(below)} and holds no settings; set {section} "
                    "as a whole"
                )
                problems.append(Problem(".".join(override.path), message))
                break
            mapping = below
        else:
            mapping[last] = override.value
    return result


@dataclass(frozen=True)
class SectionReader:
    """Reads the sections of one document and collects their problems.

    Attributes
    ----------
    document, overrides
        Plain values, to which the overrides have been applied already.
    problems
        Receives every problem.
    open_own
        Loads code of the user; without it only names of the catalogue are accepted.
    folder
        Folder of the document, the base of its relative paths; None without a file.
    folders
        Receives the folders in which code of the user was found.
    """

    document: Mapping[str, Any]
    overrides: Sequence[Override]
    problems: list[Problem]
    open_own: OpenOwn | None = None
    folder: Path | None = None
    folders: list[Path] = field(default_factory=list)

    def choice(
        self,
        section: str,
        known: SettingsTypes,
        default: str | None = None,
        value: object = None,
    ) -> Choice[Settings] | None:
        """Parse a section that names an entry of the catalogue or the user's code.

        ``value`` replaces the section of the document. ``default`` is the name where
        the section gives none. Returns None if the section has problems.
        """
        may_be_a_name = value is not None or default is not None
        if value is None:
            value = self.document.get(section, {} if default else None)
        if isinstance(value, str) and may_be_a_name:
            value = {"name": value}
        if not isinstance(value, Mapping):
            shown_value = "nothing" if value is None else shown(value)
            example = f"{{name: {sorted(known)[0]}}}" if known else "{name: ...}"
            self.add_problem(
                section, f"found {shown_value}, expected a mapping such as {example}"
            )
            return None
        name = value.get("name", default)
        settings = {key: item for key, item in value.items() if key != "name"}
        if is_reference(name) and self.open_own is not None:
            return self.own_choice(section, str(name), settings)
        if not isinstance(name, str) or name not in known:
            shown_value = (
                "found no name" if name is None else f"unknown name {shown(name)}"
            )
            nearest = alternatives(str(name), known)
            self.add_problem(f"{section}.name", f"{shown_value}; {nearest}")
            return None
        parsed = self.parse(section, known[name], settings)
        return None if parsed is None else Choice(name, parsed)

    def own_choice(
        self, section: str, reference: str, settings: Mapping[str, Any]
    ) -> Choice[Settings] | None:
        """Load code of the user and parse its settings; None if either has problems."""
        assert self.open_own is not None, "asked before"
        expected = self.document.get("own_code")
        try:
            own_code = self.open_own(section, reference, self._own_code())
            if isinstance(expected, Mapping):
                own_code.require(reference, str(expected.get(reference, "")))
        except OwnCodeError as error:
            place = f"{section}.name"
            self.problems.append(Problem(place, str(error), error.reasons))
            return None
        if own_code.folder is not None:
            self.folders.append(own_code.folder)
        parsed = self.parse(section, own_code.settings_type, settings)
        if parsed is None:
            return None
        return Choice(reference, parsed, own_code.entry, own_code.fingerprint)

    def parse(
        self, section: str, settings_type: type[S], value: object = None
    ) -> S | None:
        """Parse a section, or ``value`` in its place; None if it has problems."""
        if value is None:
            value = self.document.get(section, {})
        hint = self._hint(section)
        return parse_settings(settings_type, value, section, self.problems, hint)

    def _hint(self, section: str) -> str:
        """Explain how to remove keys of an entry that an override has replaced."""
        for chooser in (section, *["method"] * (section == "personalization")):
            changes = {(chooser,), (chooser, "name")}
            names = [
                override.value
                for override in self.overrides
                if override.path in changes
            ]
            if names:
                whole = "{}" if chooser != section else f"{{name: {names[-1]}}}"
                return (
                    f"; an override changed {chooser}: if this key belongs to the "
                    "former one, replace the section, "
                    f"--set '{section}={whole}'"
                )
        return ""

    def _own_code(self) -> Path | None:
        """Return the folder in which the user's code is looked up first."""
        own_code = self.document.get("own_code")
        if isinstance(own_code, str):
            return Path(own_code) if self.folder is None else self.folder / own_code
        if own_code is not None and not isinstance(own_code, Mapping):
            self.add_problem("own_code", f"found {shown(own_code)}, expected a folder")
        return self.folder

    def add_problem(self, place: str, message: str) -> None:
        """Add a problem at a place such as ``training.loss``."""
        self.problems.append(Problem(place, message))


def plain(value: object) -> Any:
    """Return settings as plain values, choices as a mapping with their name."""
    if isinstance(value, Choice):
        return {"name": value.name, **plain(value.settings)}
    if isinstance(value, Settings):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return to_jsonable_python(value)


def dotted(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no mapping, with its dotted key after ``place``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value
