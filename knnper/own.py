"""Code of users: ``module:attribute`` in place of a name of the catalogue.

The module is looked up beside the experiment's file, then on the Python path. Its
settings are the parameters of the function or class.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from knnper.errors import ConfigError, KnnPerError, OwnCodeError, Problem, kind_of
from knnper.reasons import Code, SafeReason
from knnper.settings import (
    Own,
    Reference,
    Settings,
    alternatives,
    nearest,
    parse_settings,
)
from knnper.yaml_text import read_yaml

# Files of users' code. Errors that pass through them become `OwnCodeError`.
_FILES = set[str]()

# Modules imported from beside an experiment: SHA-256 at the import, by file.
_LOADED: dict[Path, str] = {}

# The folder of the experiment that is first on the Python path; empty without one.
_SEARCHED: list[Path] = []

LOCAL_VARIABLE = "KNNPER_LOCAL"
"""Environment variable: path of a YAML file of `MachineSettings`."""


@dataclass(frozen=True)
class Kind:
    """The kind of code that a section of an experiment accepts."""

    expected: str  # as in "a torch.nn.Module class, or a function that returns one"
    # Settings beside the parameters, unless the attribute has a ``settings_type``.
    base: type[Settings] = Settings
    supplied: Collection[str] = ()  # parameters that the caller passes: not settings
    is_right: Callable[[Any], bool] = callable
    # Returns advice about an attribute of a wrong kind, for the error; may be empty.
    advice: Callable[[Any], str] = lambda _: ""


@dataclass(frozen=True)
class Door:
    """Where users' code is looked up, and which of it may be used."""

    folder: Path | None = None  # searched first; None: only the Python path
    allowed: Collection[str] | None = None  # references; None: all
    # Files of networks' weights; None: the files that the experiment names.
    pretrained: Mapping[str, Path] | None = None

    def open(self, reference: str, kind: Kind) -> Own:
        """Load ``reference``; raise `OwnCodeError` if it cannot be used."""
        if self.allowed is not None and reference not in self.allowed:
            guess = nearest(reference, self.allowed)
            raise OwnCodeError(
                f"found {reference!r}, which may not be used here: it needs own_code: "
                f"{{folder: FOLDER, allowed: [{reference}]}} in the file of the client "
                f"or server; {guess}".rstrip("; "),
                reason=SafeReason(Code.OWN_CODE_NOT_ALLOWED),
            )
        module_name, _, path = reference.partition(":")
        module, fingerprint = _module(module_name, self.folder, reference)
        file = getattr(module, "__file__", None) or ""
        entry: Any = module
        for part in path.split("."):
            if not hasattr(entry, part):
                public = [name for name in vars(entry) if not name.startswith("_")]
                raise OwnCodeError(
                    f"{reference}: {module_name} has no {part!r}; "
                    f"{alternatives(part, public)}"
                )
            entry = getattr(entry, part)
        if not kind.is_right(entry):
            kind_of_entry = (
                "a class" if isinstance(entry, type) else type(entry).__name__
            )
            message = f"{reference}: found {kind_of_entry}, expected {kind.expected}"
            advice = kind.advice(entry)
            raise OwnCodeError(f"{message}; {advice}" if advice else message)
        settings = getattr(entry, "settings_type", None)
        if not (isinstance(settings, type) and issubclass(settings, Settings)):
            supplied = frozenset(kind.supplied)
            # mypy takes the hash of a class for that of its instances.
            settings = settings_of(entry, kind.base, supplied)  # type: ignore[arg-type]
        return Own(entry, settings, fingerprint, file, self.folder)


CLOSED = Door(None, (), {})
"""Allows no code."""


@dataclass(frozen=True)
class OwnCodeSettings(Settings):
    """The code on this machine that experiments and models from elsewhere may name.

    Attributes
    ----------
    folder
        Searched before the Python path; null: only the Python path.
    allowed
        Allowed references, such as ``model:Net``. Their settings come from elsewhere.
    """

    folder: Path | None = None
    allowed: tuple[Reference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """Code and weights of this machine for experiments and models from elsewhere.

    Attributes
    ----------
    own_code
        See `OwnCodeSettings`.
    pretrained
        Files of frozen weights, by ``model.architecture`` or its last part, or by the
        model's name; for ``transformers`` the model's folder.
    """

    own_code: OwnCodeSettings = OwnCodeSettings()
    pretrained: dict[str, Path] = field(default_factory=dict)

    @property
    def door(self) -> Door:
        """The code that may be used."""
        return Door(self.own_code.folder, self.own_code.allowed, self.pretrained)

    def at(self, base: Path) -> dict[str, Any]:
        """Return both settings with relative paths resolved against ``base``."""
        folder, allowed = self.own_code.folder, self.own_code.allowed
        folder = None if folder is None else base / folder
        return {
            "own_code": OwnCodeSettings(folder, allowed),
            "pretrained": {name: base / path for name, path in self.pretrained.items()},
        }


def local_door() -> Door:
    """Return the code that this process allows to models from elsewhere."""
    named = os.environ.get(LOCAL_VARIABLE)
    if not named:
        return CLOSED
    file, problems = Path(named).absolute(), list[Problem]()
    settings = parse_settings(MachineSettings, read_yaml(file), "", problems)
    if settings is None:
        raise ConfigError(problems, named)
    return MachineSettings(**settings.at(file.parent)).door


def given_to(entry: Callable[..., Any], **possible: Any) -> dict[str, Any]:
    """Return the ``possible`` arguments for which ``entry`` has parameters."""
    names = _parameters(entry)
    return {name: value for name, value in possible.items() if name in names}


def arguments(settings: Settings, base: type[Settings]) -> dict[str, Any]:
    """Return the values of the settings that ``base`` does not have, by name."""
    left_out = {field.name for field in fields(base)}
    names = [field.name for field in fields(settings) if field.name not in left_out]
    return {name: getattr(settings, name) for name in names}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of users' code into an `OwnCodeError` with their traceback."""
    try:
        yield
    except KnnPerError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        first = next(
            (n for n, frame in enumerate(frames) if frame.filename in _FILES), -1
        )
        if first < 0:
            raise
        lines = traceback.format_list(frames[first:])
        last = [frame for frame in frames if frame.filename in _FILES][-1]
        raise OwnCodeError(
            f"{frames[first].filename} failed:\n{''.join(lines)}"
            f"{''.join(traceback.format_exception_only(error)).rstrip()}",
            reason=SafeReason(
                Code.OWN_CODE_FAILED, line=last.lineno or 0, error=kind_of(error)
            ),
        ) from error


@functools.cache
def settings_of(
    entry: Callable[..., Any], base: type[Settings], supplied: frozenset[str]
) -> type[Settings]:
    """Return settings with a field for each parameter, derived from ``base``.

    Parameters in ``supplied`` are omitted, and those whose type a settings file cannot
    hold, which must have a default.
    """
    reserved = supplied | {field.name for field in fields(base)}
    fields_of_settings: list[Any] = []
    hints = _hints(entry)
    for name, parameter in _parameters(entry).items():
        if name in reserved or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        has_default = parameter.default is not parameter.empty
        annotation = _plain(hints.get(name, Any))
        if annotation is None or (has_default and not _is_plain(parameter.default)):
            if not has_default:
                raise OwnCodeError(
                    f"{_name(entry)} takes {name}: {hints[name]}, which a file of "
                    "settings cannot hold; give it a default, or plain values"
                )
            continue
        default = field(default=parameter.default) if has_default else field()
        fields_of_settings.append((name, annotation, default))
    # A parameter without a default may stand behind those of the base.
    return make_dataclass(
        _name(entry), fields_of_settings, bases=(base,), frozen=True, kw_only=True
    )


def _parameters(entry: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(entry).parameters)
    except (TypeError, ValueError):  # of a builtin
        return {}


def _hints(entry: Any) -> dict[str, Any]:
    function = getattr(entry, "__init__", None) if isinstance(entry, type) else entry
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _plain(annotation: Any) -> Any:
    """Return the part of a type that plain values can have; None if there is none."""
    if get_origin(annotation) in (Union, UnionType):
        members = [_plain(member) for member in get_args(annotation)]
        members_without_none = [member for member in members if member is not None]
        return Union[tuple(members_without_none)] if members_without_none else None  # noqa: UP007 (a list of them)
    if annotation is NoneType:
        return annotation
    if get_origin(annotation) in (tuple, list, dict) and get_args(annotation):
        members = [
            member if member is ... else _plain(member)
            for member in get_args(annotation)
        ]
        if any(member is None for member in members):
            return None
        return get_origin(annotation)[tuple(members)]
    try:
        schema = TypeAdapter(annotation, config=_adapting(annotation))
    except (PydanticSchemaGenerationError, PydanticUserError):
        return None
    return annotation if schema.core_schema["type"] != "callable" else None


def _adapting(annotation: Any) -> ConfigDict | None:
    # Pydantic lets a type with settings of its own have no others.
    return None if hasattr(annotation, "__pydantic_config__") else ConfigDict()


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return hasattr(value, "__pydantic_config__")
    return True


def _name(entry: Any) -> str:
    return str(getattr(entry, "__name__", type(entry).__name__))


def _module(name: str, folder: Path | None, reference: str) -> tuple[ModuleType, str]:
    """Import a module; return it with the SHA-256 of its source."""
    file = None if folder is None else _file_of(name, folder)
    root = None if folder is None else folder.absolute()
    if root is None or file is None:
        if _is_beside_another(name, root):
            _forget_all()
            _search_first(root)
        return _installed(name, folder, reference)
    sources = _sources(file, root)
    contents = {
        source: hashlib.sha256(source.read_bytes()).hexdigest() for source in sources
    }
    same = all(
        _LOADED.get(source, digest) == digest for source, digest in contents.items()
    )
    if [root] != _SEARCHED or not same:
        _forget_all()
    _search_first(root)
    for source in sources:
        _require_free(source, root, reference)
    _LOADED.update(contents)
    _FILES.update(map(str, sources))
    return _imported(name, reference), _fingerprint(sources, root)


def _is_beside_another(name: str, root: Path | None) -> bool:
    """Return whether importing a module would return another experiment's."""
    loaded = getattr(sys.modules.get(name), "__file__", None) or ""
    is_there = any(
        folder != root and _file_of(name, folder) is not None for folder in _SEARCHED
    )
    return is_there or Path(loaded) in _LOADED


def _search_first(root: Path | None) -> None:
    """Put the folder of an experiment first on the Python path, in place of another."""
    former = {str(folder) for folder in _SEARCHED}
    _SEARCHED[:] = [] if root is None else [root]
    others = [place for place in sys.path if place not in former]
    sys.path[:] = [*map(str, _SEARCHED), *others]
    importlib.invalidate_caches()  # they do not see a file that is as old as its folder


def _imported(name: str, reference: str) -> ModuleType:
    # Caches of bytecode take a file that changes twice in a second for the same.
    writes_nothing, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with explained():
            return importlib.import_module(name)
    except SyntaxError as error:
        message = "".join(traceback.format_exception_only(error)).rstrip()
        raise OwnCodeError(f"{reference} cannot be read:\n{message}") from error
    finally:
        sys.dont_write_bytecode = writes_nothing


def _require_free(file: Path, root: Path, reference: str) -> None:
    """Reject a file with the name of a module loaded from elsewhere."""
    parts = file.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    existing = getattr(sys.modules.get(name), "__file__", str(file))
    if existing != str(file):
        raise OwnCodeError(
            f"{reference}: {file} has the name of the loaded module {existing}; "
            "rename the file"
        )


def _fingerprint(sources: Collection[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(root)}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _installed(
    name: str, folder: Path | None, reference: str
) -> tuple[ModuleType, str]:
    try:
        module = _imported(name, reference)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise OwnCodeError(
                f"{reference}: {name} cannot be imported: {error}"
            ) from error
        place = "" if folder is None else f" in {folder} or"
        raise OwnCodeError(
            f"{reference}: found no module {name!r}{place} on the Python path; "
            "expected a file beside the experiment, or an installed package"
        ) from error
    place = getattr(module, "__file__", None) or ""
    top = name.partition(".")[0]
    if not place.endswith(".py") or top == "torch":  # of any version
        return module, ""
    file = Path(place)
    # As of files of these names beside an experiment.
    root = file.parents[name.count(".") + (file.stem == "__init__")]
    sources = [
        distribution
        for distribution in _sources(file, root, top)
        if distribution.relative_to(root).with_suffix("").parts[0] == top
    ]
    _FILES.update(map(str, sources))
    return module, _fingerprint(sources, root)


def _file_of(name: str, folder: Path) -> Path | None:
    place = folder.absolute().joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _sources(file: Path, folder: Path, package: str = "") -> list[Path]:
    """Return a file and the files in ``folder``, of ``package``, that it imports."""
    sources, waiting = set[Path](), [file]
    while waiting:
        source = waiting.pop()
        if source in sources:
            continue
        sources.add(source)
        above = source.parent.relative_to(folder).parts
        for name in _imports(source.read_bytes(), above):
            parts = name.split(".")
            if package and parts[0] != package:
                continue
            places = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            waiting += filter(None, (_file_of(place, folder) for place in places))
    return sorted(sources)


# A batch reads the same files for each of its experiments.
@functools.lru_cache(maxsize=1024)
def _imports(source: bytes, package: tuple[str, ...]) -> frozenset[str]:
    """Return the full names of the modules and attributes that a file imports."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return frozenset()  # the import will raise the error
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            names += [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
    return frozenset(names)


def _forget_all() -> None:
    """Unload all modules that were imported from beside an experiment."""
    files = {str(file) for file in _LOADED}
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files:
            del sys.modules[name]
    _LOADED.clear()
