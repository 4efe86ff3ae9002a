"""The sections that all runs of a file share: its own, or those of an experiment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knnper.config.errors import ConfigError, Problem
from knnper.config.suggestions import shown
from knnper.config.yaml_text import read_yaml


def shared_sections(
    base: Mapping[str, Any] | None, experiment: str | None, path: Path
) -> Mapping[str, Any]:
    """Return the sections that the file at ``path`` gives, or names the file of.

    Parameters
    ----------
    base
        The sections, as the file has them.
    experiment
        In their place the path of an experiment's file, from the folder of this one.
    path
        The file.

    Raises
    ------
    ConfigError
        If the experiment's file cannot be read, or holds something else.
    """
    if experiment is None:
        return base or {}
    place = path.parent / experiment
    document = read_yaml(place)
    if not isinstance(document, Mapping):
        message = f"found {shown(document)}, expected the sections of an experiment"
        raise ConfigError([Problem(str(place), message)], str(path))
    return document
