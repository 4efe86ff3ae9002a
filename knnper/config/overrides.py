"""Settings given on the command line on top of a file: ``training.num_rounds=50``."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knnper.config.errors import ConfigError, Problem
from knnper.config.suggestions import shown
from knnper.config.yaml_text import parse_yaml


@dataclass(frozen=True)
class Override:
    """One setting that replaces what a file says.

    Attributes
    ----------
    path
        The keys on the way to the setting.
    value
        What it becomes.
    """

    path: tuple[str, ...]
    value: Any


def parse_overrides(
    texts: Sequence[str], problems: list[Problem]
) -> tuple[Override, ...]:
    """Return the overrides among ``texts``; what is malformed joins ``problems``."""
    overrides = []
    for text in texts:
        try:
            overrides.append(_parse(text))
        except ConfigError as error:
            problems.extend(error.problems)
    return tuple(overrides)


def _parse(text: str) -> Override:
    name, equals, value = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        expected = "expected KEY=VALUE, as in training.num_rounds=50"
        raise ConfigError([Problem("override", f"{expected}, found {shown(text)}")])
    try:
        return Override(path, parse_yaml(value, text))
    except ConfigError as error:
        reasons = "; ".join(problem.message for problem in error.problems)
        place = ".".join(path)
        message = f"found {shown(value)}, expected a YAML value: {reasons}"
        raise ConfigError([Problem(place, message)]) from error


def with_overrides(source: str, overrides: Sequence[str]) -> str:
    """Return what errors call ``source`` once it is changed by ``overrides``."""
    return f"{source} with {', '.join(overrides)}" if overrides else source


def apply_overrides(
    document: Mapping[str, Any],
    overrides: Sequence[Override],
    problems: list[Problem],
) -> dict[str, Any]:
    """Return a copy of ``document`` with ``overrides`` made in order: the last wins.

    Sections on the way are created as needed. An override that leads through a value
    that is no section joins ``problems``.
    """
    result = copy.deepcopy(dict(document))
    for override in overrides:
        section = _section(result, override.path, problems)
        if section is not None:
            section[override.path[-1]] = override.value
    return result


def _section(
    document: dict[str, Any], path: tuple[str, ...], problems: list[Problem]
) -> dict[str, Any] | None:
    """Return the mapping that holds the last key of ``path``."""
    here = document
    for depth, part in enumerate(path[:-1], start=1):
        below = here.get(part)
        if below is None:
            below = here[part] = {}
        if not isinstance(below, dict):
            message = (
                f"{'.'.join(path[:depth])} is {shown(below)} and holds no settings; "
                f"set {'.'.join(path[:depth])} as a whole"
            )
            problems.append(Problem(".".join(path), message))
            return None
        here = below
    return here
