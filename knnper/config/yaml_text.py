"""YAML as experiments use it: plain values, and no key twice."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from knnper.config.errors import ConfigError, Problem


class _ExperimentLoader(yaml.SafeLoader):
    """Reads YAML 1.2's plain values and refuses a key that occurs twice.

    PyYAML follows YAML 1.1, where ``1e-3`` is text, ``no`` is false, ``010`` is 8 and
    ``1:30`` is 90.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in the base class)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the mapping that comes next, once its keys have been looked at."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be plain text", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} occurs twice; keep one of the two",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        return node


class _ExperimentDumper(yaml.SafeDumper):
    """Quotes text that the loader, or any reader of YAML 1.1, would take for more."""


_PLAIN_VALUES = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
for _kind, (_pattern, _first) in _PLAIN_VALUES.items():
    for _yaml in (_ExperimentLoader, _ExperimentDumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}",
            re.compile(f"^(?:{_pattern})$"),
            ["" if character == "\0" else character for character in _first],
        )


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=_ExperimentDumper, sort_keys=False)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of ``text``: mappings, lists, text, numbers, booleans or None.

    Raises
    ------
    ConfigError
        If it is no valid YAML (with line and column), a key occurs twice, or a value
        is of another kind.
    """
    try:
        value = yaml.load(text, _ExperimentLoader)
        json.dumps(value)
    except yaml.YAMLError as error:
        raise ConfigError([_as_problem(error)], source) from error
    except (TypeError, ValueError, RecursionError) as error:
        message = (
            f"holds a value that is not text, a number, a list or the like: {error}"
        )
        raise ConfigError([Problem("document", message)], source) from error
    return value


def read_yaml(path: Path) -> Any:
    """Return the value of the YAML file at ``path``.

    Raises
    ------
    ConfigError
        If the file cannot be read, and as `parse_yaml`.
    """
    source = str(path)
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), source)
    except (OSError, UnicodeDecodeError) as error:
        message = f"expected a readable text file in UTF-8: {error}"
        raise ConfigError([Problem(source, message)], source) from error


def _as_problem(error: yaml.YAMLError) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem("document", f"invalid YAML: {error}")
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    context = f"{error.context}, " if error.context else ""
    return Problem(place, f"invalid YAML: {context}{error.problem}")
