"""Files that the file of a batch builds on: an experiment, or another comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knnper.errors import ConfigError, Problem
from knnper.experiment_file import require_kind
from knnper.settings import is_reference, shown
from knnper.yaml_text import read_yaml

Section = dict[str, Any]  # of an experiment, as plain values
# Keys of a comparison's file with entries that are inherited one by one.
_INHERITED = ("base", "rows", "grid", "tuning_set")


def shared_sections(
    base: Mapping[str, Any] | None, experiment: str | None, path: Path
) -> Mapping[str, Any]:
    """Return the sections ``base`` of a file, or those of the experiment it names.

    ``path``: The file of the batch, which relative paths start from.
    """
    if experiment is None:
        return base or {}
    file = path.parent / experiment
    document = read_yaml(file)
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the sections of an experiment"
        raise ConfigError([Problem(str(file), message)], str(path))
    require_kind(document, "experiment", str(file))
    return _with_code_folder(document, file, document)


def with_extended(path: Path, document: Any, within: tuple[Path, ...] = ()) -> Any:
    """Return the content of a comparison's file, merged into the file it extends.

    ``within``: The files that extend this one.
    """
    if not isinstance(document, Mapping) or document.get("extends") is None:
        return document
    within = (*within, path.resolve())
    other = path.parent / str(document["extends"])
    if other.resolve() in within:
        message = f"found {other}, which extends this file, expected another comparison"
        raise ConfigError([Problem("extends", message)], str(path))
    extended = read_yaml(other)
    require_kind(extended, "comparison", str(other))
    inherited = with_extended(other, extended, within)
    if not isinstance(inherited, Mapping):
        message = f"found no sections in {other}, expected the file of a comparison"
        raise ConfigError([Problem("extends", message)], str(path))
    base = _with_code_folder(_section(inherited, "base"), other, inherited)
    if base:
        inherited = {**inherited, "base": base}
    return _merge_files(inherited, document)


def _merge_files(inherited: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """Merge two files; where both set something, ``document`` wins."""
    merged = _merge(inherited, document)
    for key in _INHERITED:
        if key in merged:
            merged[key] = _merge(inherited.get(key), document.get(key))
    old_base, new_base = _section(inherited, "base"), _section(document, "base")
    for name in old_base.keys() & new_base.keys():
        old, new = _section(old_base, name), _section(new_base, name)
        # The settings of a section with another name do not fit.
        if new and new.get("name", old.get("name")) == old.get("name"):
            merged["base"][name] = {**old, **new}
    return merged


def _merge(inherited: Any, value: Any) -> Any:
    """Merge two mappings, without keys that are null; other values are not merged.

    The parser rejects a value that should be a mapping and is none.
    """
    if not isinstance(inherited, Mapping) or not isinstance(value, Mapping):
        return inherited if value is None else value
    merged = {**inherited, **value}
    return {key: entry for key, entry in merged.items() if entry is not None}


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key)
    return section if isinstance(section, Mapping) else {}


def _with_code_folder(
    sections: Mapping[str, Any], file: Path, content: object
) -> Mapping[str, Any]:
    """Set ``own_code`` of another file's sections to an absolute path.

    Users' code is looked for beside the file that names it; sections are set only if
    ``content``, that of the file, names any.
    """
    folder = file.absolute().parent
    code = sections.get("own_code")
    if isinstance(code, str) or (code is None and _names_own_code(content)):
        return {**sections, "own_code": str(folder / (code or ""))}
    return sections


def _names_own_code(values: object) -> bool:
    """Return whether any text in plain values is ``module:attribute``."""
    if isinstance(values, Mapping):
        return any(map(_names_own_code, values.values()))
    if isinstance(values, list):
        return any(map(_names_own_code, values))
    return is_reference(values)
