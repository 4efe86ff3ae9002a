"""YAML as experiment files use it: values of YAML 1.2, limits on hostile input."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from knnper.errors import ConfigError, Problem
from knnper.files import MOST_NESTED, read_file

# A document may expand to twice the length of its text and this many characters more.
_MOST_ADDED_BY_ALIASES = 1_000_000
# PyYAML needs quadratic time for integers of base 60 (`!!int 1:1:1:...`).
_MOST_DIGITS = 1000
_INTEGER_TAG = "tag:yaml.org,2002:int"
# For each tag: the pattern of its plain values and the characters that begin them
# ("\0" stands for an empty value).
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


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2's plain values; rejects duplicate keys and large expansions.

    PyYAML follows YAML 1.1, where ``1e-3`` is text, ``no`` is false, ``010`` is 8 and
    ``1:30`` is 90. It also lets ten lines of aliases stand for 10^10 values, which any
    code that copies or writes the document would spell out, so expansions are counted.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in the base class)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._most_characters = 2 * len(text) + _MOST_ADDED_BY_ALIASES
        self._num_levels = 0  # around the node that is being composed
        # Characters and levels of each composed node with its aliases spelled out.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; reject one that is nested or expanded too far."""
        is_alias = self.check_event(yaml.AliasEvent)
        self._num_levels += 1
        _require_depth(self._num_levels, self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._num_levels -= 1
        if node is not None and not is_alias:
            self._sizes[node] = self._expanded(node)
        return node

    def _expanded(self, node: yaml.Node) -> tuple[int, int]:
        parts: list[Any] = node.value
        if isinstance(node, yaml.ScalarNode):
            if node.tag == _INTEGER_TAG and len(parts) > _MOST_DIGITS:
                problem = f"an integer has more than {_MOST_DIGITS} characters"
                raise _malformed(problem, node)
            return 1 + len(parts), 1
        if isinstance(node, yaml.MappingNode):
            parts = list(itertools.chain.from_iterable(parts))
        # A node that contains itself has no size yet; `parse_yaml` rejects it.
        sizes = [self._sizes.get(part, (0, 0)) for part in parts]
        num_characters = 1 + sum(size for size, _ in sizes)
        num_levels = 1 + max((levels for _, levels in sizes), default=0)
        _require_depth(num_levels, node)
        if num_characters > self._most_characters:
            raise _malformed(
                "aliases expand this value to more than "
                f"{self._most_characters} characters; write the values out",
                node,
            )
        return num_characters, num_levels

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose the next mapping; reject keys that are no text or occur twice."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            problem = None
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be plain text"
            elif key.value in seen:
                problem = f"the key {key.value!r} occurs twice; keep one of the two"
            if problem is not None:
                raise _malformed(problem, key)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader, or YAML 1.1, would not read as text."""


for _kind, (_pattern, _first) in _PLAIN_VALUES.items():
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}",
            re.compile(f"^(?:{_pattern})$"),
            ["" if character == "\0" else character for character in _first],
        )


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of ``text``; raise `ConfigError`, which names ``source``."""
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value)
    except yaml.YAMLError as error:
        raise ConfigError([_as_problem(error)], source) from error
    # PyYAML raises these for a value that does not fit its tag, such as `!!bool x`.
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        message = f"holds a value that is not text, a number, a list or so: {error}"
        raise ConfigError([Problem("document", message)], source) from error
    return value


def read_yaml(path: Path, missing: str = "expected the path of a YAML file") -> Any:
    """Return the value of the YAML file at ``path``.

    Raises `ConfigError`; ``missing`` is its advice if there is no such file.
    """
    source = str(path)
    try:
        return parse_yaml(read_file(path).decode("utf-8"), source)
    except FileNotFoundError as error:
        message = f"there is no such file; {missing}"
        raise ConfigError([Problem(source, message)], source) from error
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


def _malformed(problem: str, at: Any) -> yaml.MarkedYAMLError:
    """Return an error with the position of a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _require_depth(num_levels: int, at: Any) -> None:
    if num_levels > MOST_NESTED:
        problem = f"values are nested more than {MOST_NESTED} levels deep"
        raise _malformed(problem, at)
